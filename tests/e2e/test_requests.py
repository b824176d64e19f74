"""What a client of the public endpoint sees: fields of requests, answers, and the edge's own routes."""

import json

import openai
import pytest

from tests.e2e.harness import Serve, echoed

pytestmark = pytest.mark.e2e

SERVE = ("--echo-context", "512", "--tool-call-parser", "hermes")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GOOD: dict[str, dict[str, object]] = {
    CHAT: {"model": "echo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    COMPLETIONS: {"model": "echo", "prompt": "Hello", "max_tokens": 4},
    "/v1/responses": {"model": "echo", "input": "Hello", "max_output_tokens": 4},
    "/v1/messages": {"model": "echo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
}


def error_of(status: int, text: str, expected: int = 400) -> dict[str, object]:
    """Return the error in an answer, which has OpenAI's envelope."""
    assert status == expected, text
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_values_that_openai_takes_are_taken(serve: Serve, path: str) -> None:
    neutral = {"top_p": 0, "stop": [], "user": "", "n": 2, "temperature": 0}
    status, text = serve.post(path, {**GOOD[path], **neutral})
    assert status == 200, text
    assert len(json.loads(text)["choices"]) == 2


def test_a_completion_has_sixteen_tokens_unless_it_says_otherwise(serve: Serve) -> None:
    client = serve.client()
    assert client.completions.create(model="echo", prompt="Hello").choices[0].text == echoed("Hello", 16)
    whole = client.completions.create(model="echo", prompt="ab" * 250, max_tokens=None)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("ab" * 6, "length")


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (CHAT, {"verbosity": "low"}, "verbosity"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"prediction": {"type": "content", "content": "x"}}, "prediction"),
        (CHAT, {"metadata": {"a": "b"}}, "metadata"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"frobnicate": 1}, "frobnicate"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "frobnicate": 1}]}, "messages[0].frobnicate"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"max_tokens": "5"}, "max_tokens"),
        ("/v1/responses", {"previous_response_id": "x"}, "previous_response_id"),
        ("/v1/responses", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/responses", {"frobnicate": 1}, "frobnicate"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_nothing_applies_is_refused_by_name(
    serve: Serve, path: str, change: dict[str, object], param: str
) -> None:
    error = error_of(*serve.post(path, {**GOOD[path], **change}))
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert str(param) in str(error["message"])


def test_the_official_client_shows_the_field(serve: Serve) -> None:
    with pytest.raises(openai.BadRequestError, match="verbosity") as caught:
        serve.client().chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "Hello"}], verbosity="high"
        )
    assert caught.value.param == "verbosity"


def test_an_empty_answer_is_an_empty_text(serve: Serve) -> None:
    answer = serve.client().chat.completions.create(**GOOD[CHAT], stop="H")
    assert answer.choices[0].message.content == ""


def test_completions_and_their_chunks_have_every_field(serve: Serve) -> None:
    answer = serve.client().completions.create(model="echo", prompt="Hello", max_tokens=4, logprobs=1)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2, 3]
    status, text = serve.post(COMPLETIONS, {**GOOD[COMPLETIONS], "stream": True})
    assert status == 200
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert chunks
    for chunk in chunks:
        assert chunk["choices"][0].keys() == {"text", "index", "logprobs", "finish_reason"}
        assert "system_fingerprint" not in chunk
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hell"


def test_models_have_a_length_an_owner_and_capabilities(serve: Serve) -> None:
    (model,) = json.loads(serve.get("/v1/models")[1])["data"]
    assert (model["id"], model["owned_by"], model["max_model_len"]) == ("echo", "baton", 512)
    assert model["capabilities"] == {
        "chat": True,
        "completions": True,
        "embeddings": False,
        "tools": True,
        "reasoning": False,
    }
    assert serve.client().models.retrieve("echo").created == model["created"]
    error = error_of(*serve.get("/v1/models/unknown"), 404)
    assert (error["code"], "'echo'" in str(error["message"])) == ("model_not_found", True)


@pytest.mark.parametrize(
    ("path", "asked", "field"),
    [
        ("/v1/completions", {"prompt": "x" * 600}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ("/v1/responses", {"input": "x" * 600}, "input"),
    ],
)
def test_a_prompt_beyond_the_context_is_refused_by_the_name_of_its_field(
    serve: Serve, path: str, asked: dict[str, object], field: str
) -> None:
    error = error_of(*serve.post(path, {**GOOD[path], **asked}))
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert "token_ids" not in str(error["message"])


def test_a_prompt_is_tokenized_and_detokenized(serve: Serve) -> None:
    status, text = serve.post("/tokenize", {"prompt": "Hi ü", "return_token_strs": True})
    assert status == 200, text
    answer = json.loads(text)
    assert (answer["count"], answer["max_model_len"]) == (len("Hi ü".encode()), 512)
    assert len(answer["token_strs"]) == answer["count"]
    assert json.loads(serve.post("/detokenize", {"model": "echo", "tokens": answer["tokens"]})[1]) == {"prompt": "Hi ü"}


def test_the_tokens_of_a_chat_are_those_of_its_usage(serve: Serve) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
    ]
    used = json.loads(serve.post(CHAT, {**GOOD[CHAT], "messages": messages})[1])["usage"]["prompt_tokens"]
    assert json.loads(serve.post("/tokenize", {"messages": messages})[1])["count"] == used


def test_the_tokens_of_an_anthropic_message_are_those_of_its_usage(serve: Serve) -> None:
    body = {
        "model": "echo",
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "you"}]}
        ],
    }
    used = json.loads(serve.post("/v1/messages", {**body, "max_tokens": 4})[1])["usage"]["input_tokens"]
    assert json.loads(serve.post("/v1/messages/count_tokens", body)[1]) == {"input_tokens": used}


def test_a_wrong_body_of_an_own_route_is_refused_by_name(serve: Serve) -> None:
    assert error_of(*serve.post("/tokenize", {"prompt": "x", "frobnicate": 1}))["param"] == "frobnicate"
    assert error_of(*serve.post("/tokenize", {"model": "echo"}))["param"] == "prompt"
    assert error_of(*serve.post("/detokenize", {"tokens": [-1]}))["param"] == "tokens[0]"
    assert error_of(*serve.post("/detokenize", {"tokens": [65, 1_000_000]}))["param"] == "tokens[1]"
    assert error_of(*serve.post("/tokenize", {"model": "unknown", "prompt": "x"}), 404)["param"] == "model"
    error_of(*serve.post("/tokenize", "{"))


def test_a_stream_of_anthropic_messages_ends_with_its_own_event(serve: Serve) -> None:
    status, text = serve.post("/v1/messages", {**GOOD["/v1/messages"], "stream": True})
    assert status == 200
    events = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert (events[0], events[-1]) == ("message_start", "message_stop")
    assert "[DONE]" not in text


def test_metrics_have_those_of_the_edge(serve: Serve) -> None:
    assert serve.post(CHAT, GOOD[CHAT])[0] == 200
    status, text = serve.get("/metrics")
    assert status == 200
    assert 'baton_edge_answers_total{route="/v1/chat/completions",status="200"}' in text
    assert "dynamo_frontend_requests_total" in text


def test_the_description_of_the_endpoint_has_the_fields_that_matter(serve: Serve) -> None:
    document = json.loads(serve.get("/openapi.json")[1])
    schema = document["components"]["schemas"]["ChatRequest"]
    assert set(schema["required"]) == {"model", "messages"}
    assert schema["properties"]["verbosity"]["description"].startswith("Refused.")
    assert {"/v1/chat/completions", "/v1/models", "/tokenize"} <= document["paths"].keys()


def test_the_version_is_told(serve: Serve) -> None:
    assert json.loads(serve.get("/version")[1])["version"]
