"""Requests that are wrong: each is refused with a 4xx that says why, and none of them leaves a trace in the worker."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.e2e.harness import Serve, error_in

pytestmark = pytest.mark.e2e

SERVE = ("--echo-context", "256")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GOOD = {
    CHAT: {"model": "echo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    COMPLETIONS: {"model": "echo", "prompt": "Hello", "max_tokens": 4},
}

GUIDED = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}

# One of each kind, as a change to a good request, and a word of the answer that names what is wrong. Every field that a
# worker refuses is in `tests/unit/handlers/test_admission.py` and `tests/unit/protocol/test_codec.py`.
KINDS = {
    "a value of another type": (CHAT, {"max_tokens": "5"}, "string"),
    "a value out of range": (COMPLETIONS, {"temperature": 2.1}, "Temperature"),
    "a value that does not fit its type": (CHAT, {"seed": 2**64}, "'seed'"),
    "too many stop strings": (COMPLETIONS, {"stop": [str(number) for number in range(33)]}, "'stop'"),
    "an unknown field": (CHAT, {"frobnicate": 1}, "frobnicate"),
    "an unknown extension": (COMPLETIONS, {"nvext": {"frobnicate": 1}}, "frobnicate"),
    "no message": (CHAT, {"messages": []}, "messages"),
    "an unknown role": (CHAT, {"messages": [{"role": "unknown", "content": "Hello"}]}, "unknown"),
    "an empty prompt": (CHAT, {"messages": [{"role": "user", "content": ""}]}, "empty"),
    "a prompt beyond the context": (COMPLETIONS, {"prompt": [65] * 256}, "model's maximum context length is 256"),
    "an answer beyond the context": (CHAT, {"max_tokens": 252}, "max_tokens"),
    "a minimum above the maximum": (COMPLETIONS, {"min_tokens": 5}, "min_tokens"),
    "a token that the model does not have": (COMPLETIONS, {"prompt": [258]}, "token id 258 is out of range"),
    "more choices than the engine generates": (CHAT, {"n": 17}, "n: "),
    "an option that no engine has": (COMPLETIONS, {"use_beam_search": True}, "use_beam_search"),
    "an option that this engine lacks": (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo"),
    "a bias that this engine lacks": (CHAT, {"logit_bias": {"5": 1}}, "logit_bias"),
    "a bias for a completion": (COMPLETIONS, {"logit_bias": {"5": 1}}, "logit_bias"),
    "words that this engine cannot exclude": (CHAT, {"bad_words": ["a"]}, "bad_words"),
    "options of a diffusion model": (CHAT, {"diffusion": {"steps": 2}}, "diffusion.steps"),
    "a list of tokens that no engine applies": (CHAT, {"allowed_token_ids": [65]}, "allowed_token_ids"),
    "embeddings instead of a prompt": (COMPLETIONS, {"prompt_embeds": "A" * 200}, "prompt_embeds"),
    "a thinking budget": (CHAT, {"nvext": {"max_thinking_tokens": 5}}, "max_thinking_tokens"),
    "options of the media processor": (CHAT, {"mm_processor_kwargs": {"size": 5}}, "mm_processor_kwargs"),
    "an adapter": (CHAT, {"lora_name": "x"}, "lora_name"),
    "a response format": (CHAT, GUIDED, "guided_decoding.json"),
    "media": (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "image_url"),
}
# Values that the frontend refuses (see docs/known-issues.md).
REFUSED_BY_THE_FRONTEND: list[dict[str, object]] = [
    {"repetition_penalty": 2.5},
    {"max_tokens": 1_048_577},
]
MALFORMED = ['{"model":', "", "[1]", '"x"', "null", '{"model": "echo", "temperature": NaN}', "\x00", "[" * 100_000]


def assert_refusal(status: int, text: str, word: str, expected: int = 400) -> None:
    """Check that the answer is an error of that status with `word` in its message."""
    assert status == expected, text
    error = error_in(text)
    assert error["type"] == "invalid_request_error"
    assert word.lower() in error["message"].lower()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_value_is_refused_by_name_and_the_worker_serves_on(serve: Serve, kind: str, stream: bool) -> None:
    path, change, word = KINDS[kind]
    assert_refusal(*serve.post(path, {**GOOD[path], "stream": stream, **change}), word)
    assert serve.post(path, GOOD[path])[0] == 200


def test_values_that_the_frontend_does_not_accept_are_refused(serve: Serve) -> None:
    for path, good in GOOD.items():
        for change in REFUSED_BY_THE_FRONTEND:
            assert_refusal(*serve.post(path, {**good, **change}), "")


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: repr(text[:20]))
def test_a_body_that_is_not_a_request_is_refused(serve: Serve, text: str) -> None:
    assert_refusal(*serve.post(CHAT, text), "")


def test_a_body_that_is_not_utf8_is_refused(serve: Serve) -> None:
    assert_refusal(*serve.post(CHAT, b'{"model": "\xff\xfe"}'), "")


@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (COMPLETIONS, "prompt"), (CHAT, "model")])
def test_a_missing_field_is_named(serve: Serve, path: str, field: str) -> None:
    body = {name: value for name, value in GOOD[path].items() if name != field}
    assert_refusal(*serve.post(path, body), field)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_unknown_model_is_not_found(serve: Serve, path: str) -> None:
    words = "the model 'unknown' does not exist: this deployment serves 'echo'"
    assert_refusal(*serve.post(path, {**GOOD[path], "model": "unknown"}), words, 404)


def test_a_wrong_method_is_refused(serve: Serve) -> None:
    assert_refusal(*serve.get(CHAT), "use POST", 405)


def test_an_unknown_route_is_not_found(serve: Serve) -> None:
    assert_refusal(*serve.get("/v1/frobnicate"), "there is no /v1/frobnicate", 404)


def test_an_unknown_model_is_not_retrieved(serve: Serve) -> None:
    with pytest.raises(openai.NotFoundError):
        serve.client().models.retrieve("unknown")


def test_embeddings_of_a_model_without_them_are_not_found(serve: Serve) -> None:
    with pytest.raises(openai.NotFoundError):
        serve.client().embeddings.create(model="echo", input="Hello")


def test_the_official_client_shows_the_message(serve: Serve) -> None:
    with pytest.raises(openai.BadRequestError, match=r"guided_decoding\.json"):
        serve.client().chat.completions.create(
            model="echo",
            messages=[{"role": "user", "content": "Hello"}],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        )
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        serve.client().completions.create(model="echo", prompt="Hello", extra_body={"prompt_logprobs": 2})


def test_stream_options_without_a_stream_are_refused(serve: Serve) -> None:
    for path, good in GOOD.items():
        assert_refusal(*serve.post(path, {**good, "stream_options": {"include_usage": True}}), "stream_options")


def test_the_last_token_of_the_context_can_be_used(serve: Serve) -> None:
    answer = serve.client().completions.create(model="echo", prompt="ab" * 127, max_tokens=2)
    assert answer.choices[0].text == "ab"
    full = serve.client().completions.create(model="echo", prompt="ab" * 127 + "c", max_tokens=None)
    assert (full.choices[0].text, full.choices[0].finish_reason) == ("a", "length")


def test_a_prompt_of_megabytes_is_refused_while_others_are_served(serve: Serve) -> None:
    with ThreadPoolExecutor(1) as pool:
        huge = pool.submit(serve.post, COMPLETIONS, {**GOOD[COMPLETIONS], "prompt": "x" * 4_000_000})
        while not huge.done():
            assert serve.post(CHAT, GOOD[CHAT])[0] == 200
    assert_refusal(*huge.result(), "prompt has 4000000")


def test_a_body_over_the_limit_is_refused(serve: Serve) -> None:
    status, text = serve.post(COMPLETIONS, b" " * (46 * 2**20))
    assert_refusal(status, text, "larger than 32 MiB", 413)


def test_many_wrong_requests_at_once_leave_the_worker_untouched(serve: Serve) -> None:
    pid = serve.worker().pid
    bodies = [(path, {**GOOD[path], **change}) for path, change, _ in KINDS.values()] * 8
    with ThreadPoolExecutor(32) as pool:
        statuses = {status for status, _ in pool.map(lambda case: serve.post(*case), bodies)}
        statuses |= {status for status, _ in pool.map(lambda text: serve.post(CHAT, text), MALFORMED)}
    assert statuses == {400}
    serve.assert_quiet()
    assert serve.worker().pid == pid
    assert serve.health() == 200
    assert [serve.ended(state) for state in ("failed", "expired")] == [0, 0]
    answer = serve.client().chat.completions.create(**GOOD[CHAT])
    assert answer.choices[0].message.content == "Hell"
    assert "Traceback" not in serve.log_of("worker-0")
