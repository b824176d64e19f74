"""What the users of real clients see: answers, streams, tools, structured output, and the texts of errors."""

import json
from typing import Any

import pytest

from tests.clients.conftest import CLIENTS, Results
from tests.clients.endpoint import ANSWER, MODEL, UNKNOWN_MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.clients, pytest.mark.timeout(300)]

PARIS_CALL = ["get_weather", {"city": "Paris"}]
IN_PARIS = "It is sunny in Paris."
# These show the text of an error and hide its status.
WITHOUT_STATUS = {"llm", "instructor"}
TALKING = [name for name in CLIENTS if name != "instructor"]

every_client = pytest.mark.parametrize("client", CLIENTS)


def assert_error(result: Any, client: str, status: int, *words: str) -> None:
    """Check the status, and that the text that the client shows has the words."""
    assert isinstance(result, dict), result
    assert set(result) == {"raised", "status", "text"}, result
    if client not in WITHOUT_STATUS:
        assert result["status"] == status, result
    assert [word for word in words if word.lower() not in result["text"].lower()] == [], result


@pytest.mark.parametrize("client", TALKING)
def test_a_chat_is_answered(seen: Results, client: str) -> None:
    assert seen(client, "chat") == ANSWER


@pytest.mark.parametrize("client", TALKING)
def test_a_stream_has_the_same_text_in_pieces(seen: Results, client: str) -> None:
    pieces = seen(client, "stream")
    assert "".join(pieces) == ANSWER
    assert len(pieces) > 1 or client == "llm"  # which prints them


@every_client
def test_an_unknown_model_is_named_with_what_is_served(seen: Results, client: str) -> None:
    served = CLIENTS[client][2]
    assert_error(seen(client, "unknown_model"), client, 404, UNKNOWN_MODEL, served)


@every_client
def test_a_bad_parameter_is_named(seen: Results, client: str) -> None:
    named = "logit_bias" if client == "llm" else "temperature"
    assert_error(seen(client, "bad_parameter"), client, 400, named)


@every_client
def test_a_wrong_key_is_refused(seen: Results, client: str) -> None:
    assert_error(seen(client, "wrong_key"), client, 401, "API key")


@pytest.mark.parametrize("client", ["openai-python", "openai-node"])
def test_an_error_has_the_fields_of_the_envelope(seen: Results, client: str) -> None:
    fields = seen(client, "error_fields")
    assert (fields["param"], fields["type"]) == ("temperature", "invalid_request_error")
    assert fields["request_id"]


def test_the_id_of_a_request_is_returned(seen: Results) -> None:
    assert seen("openai-python", "request_id") == "given-by-the-client"


def test_models_are_listed(seen: Results) -> None:
    ((name, owner),) = seen("openai-python", "models")
    assert (name, bool(owner)) == (MODEL, True)
    assert seen("openai-node", "models") == [MODEL]
    assert_error(seen("openai-python", "unknown_model_retrieved"), "openai-python", 404, UNKNOWN_MODEL)


@pytest.mark.parametrize("client", ["openai-python", "langchain", "llama-index"])
def test_a_completion_is_answered(seen: Results, client: str) -> None:
    assert seen(client, "completion") == ANSWER[:13]


def test_a_completion_stream_has_the_same_text_in_pieces(seen: Results) -> None:
    pieces = seen("openai-python", "completion_stream")
    assert "".join(pieces) == ANSWER[:13]
    assert len(pieces) > 1


def test_a_completion_has_sixteen_tokens_unless_the_client_asks_for_more(seen: Results) -> None:
    assert seen("openai-python", "completion_default_length") == [16, "length"]


def test_openai_python_calls_a_tool_and_reads_the_answer(seen: Results) -> None:
    name, arguments, answer = seen("openai-python", "tool_loop")
    assert ([name, json.loads(arguments)], answer) == (PARIS_CALL, IN_PARIS)


def test_langchain_calls_tools_in_two_turns(seen: Results) -> None:
    assert seen("langchain", "tool_loop") == [
        [[PARIS_CALL], IN_PARIS],
        [[["get_weather", {"city": "Rome"}]], "It is sunny in Rome."],
    ]
    assert seen("langchain", "streamed_tool_call") == [PARIS_CALL]


def test_llama_index_calls_a_tool(seen: Results) -> None:
    assert seen("llama-index", "tool_call") == [PARIS_CALL]


@pytest.mark.parametrize("client", ["openai-node", "vercel", "pydantic-ai"])
def test_a_tool_is_run_by_the_client(seen: Results, client: str) -> None:
    assert seen(client, "tool_loop") == [IN_PARIS, ["Paris"]]


def test_vercel_reads_usage_and_errors_of_streams(seen: Results) -> None:
    assert seen("vercel", "usage") == [5, "length"]
    assert_error(seen("vercel", "streamed_error"), "vercel", 404, UNKNOWN_MODEL, MODEL)


def test_litellm_speaks_both_apis(seen: Results) -> None:
    assert (seen("litellm", "as_openai"), seen("litellm", "as_anthropic")) == (ANSWER, ANSWER)


@pytest.mark.parametrize("part", ["structured", "structured_by_tool"])
def test_instructor_gets_an_object_of_its_schema(seen: Results, part: str) -> None:
    city = seen("instructor", part)
    assert set(city) == {"name", "continent", "capital"}, city


def test_the_anthropic_sdk_gets_events_usage_and_reasons(seen: Results) -> None:
    assert seen("anthropic-python", "stream_events") == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert seen("anthropic-python", "usage") == ["max_tokens", 5, "assistant", "message"]
    assert seen("anthropic-python", "system_prompt") == ANSWER
    text, reason, sequence = seen("anthropic-python", "stop_sequence")
    assert (text, reason, sequence) == (ANSWER[: ANSWER.index("How")], "stop_sequence", "How")


def test_the_anthropic_sdk_calls_a_tool_and_reads_the_answer(seen: Results) -> None:
    assert seen("anthropic-python", "tool_loop") == ["tool_use", *PARIS_CALL, IN_PARIS]


def test_an_error_of_messages_has_the_envelope_of_anthropic(seen: Results) -> None:
    body = seen("anthropic-python", "error_envelope")
    assert body["type"] == "error"
    assert body["error"]["type"] == "not_found_error"
    assert UNKNOWN_MODEL in body["error"]["message"]
