"""What becomes of the fields of a request on its way to the frontend."""

import pytest

from baton.edge.errors import FieldError
from baton.edge.fields.prepare import prepare

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
GOOD: dict[str, dict[str, object]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "Hello"}]},
    COMPLETIONS: {"model": "m", "prompt": "Hello", "max_tokens": 4},
    EMBEDDINGS: {"model": "m", "input": "Hello"},
}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


def changed(path: str, **fields: object) -> dict[str, object]:
    """Return what the frontend gets instead of `fields`."""
    forwarded = prepare(path, {**GOOD[path], **fields})
    return {name: value for name, value in forwarded.items() if GOOD[path].get(name) != value}


def refusal(path: str, body: object) -> FieldError:
    """Return the error for a body."""
    with pytest.raises(FieldError) as caught:
        prepare(path, body)  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize("path", GOOD)
def test_a_body_that_needs_no_change_is_returned_itself(path: str) -> None:
    assert prepare(path, GOOD[path]) is GOOD[path]


def test_a_body_is_not_changed_in_place() -> None:
    body = {**GOOD[CHAT], "top_p": 0, "user": ""}
    prepare(CHAT, body)
    assert body == {**GOOD[CHAT], "top_p": 0, "user": ""}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_values_that_openai_takes_and_the_frontend_does_not(path: str) -> None:
    assert changed(path, user="", stop=[]) == {}
    assert changed(path, stop="") == {}
    assert changed(path, stop=["", "x"]) == {"stop": ["x"]}
    for least in (0, 0.0, 1e-60):
        assert 1e-30 < changed(path, top_p=least)["top_p"] < 0.001  # type: ignore[operator]
    assert changed(path, n=2, temperature=0) == {"n": 2, "top_k": 1}
    assert changed(path, n=2, temperature=4e-67) == {"n": 2, "top_k": 1}
    assert changed(path, n=2, temperature=0.5) == {"n": 2, "temperature": 0.5}


def test_a_completion_has_sixteen_tokens_by_default() -> None:
    body: dict[str, object] = {"model": "m", "prompt": "Hello"}
    assert prepare(COMPLETIONS, body)["max_tokens"] == 16
    assert prepare(COMPLETIONS, {**body, "max_tokens": None})["max_tokens"] is None


def test_fields_that_ask_for_nothing_are_left_out() -> None:
    neutral = {
        "verbosity": "medium",
        "store": False,
        "modalities": ["text"],
        "service_tier": "auto",
        "prompt_cache_retention": "in_memory",
        "metadata": {},
        "audio": None,
        "safety_identifier": "x",
        "functions": [],
        "function_call": "auto",
    }
    assert changed(CHAT, **neutral) == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("verbosity", "low"),
        ("store", True),
        ("modalities", ["audio"]),
        ("service_tier", "flex"),
        ("prompt_cache_retention", "24h"),
        ("metadata", {"a": "b"}),
        ("audio", {"voice": "x", "format": "wav"}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {}),
        ("moderation", {"model": "x"}),
    ],
)
def test_a_field_that_nothing_applies_is_refused_by_name(field: str, value: object) -> None:
    error = refusal(CHAT, {**GOOD[CHAT], field: value})
    assert (error.param, error.field_status) == (field, 400)
    assert f"'{field}'" in error.message


def test_a_suffix_is_refused() -> None:
    assert refusal(COMPLETIONS, {**GOOD[COMPLETIONS], "suffix": "x"}).param == "suffix"
    assert changed(COMPLETIONS, suffix="") == {}


@pytest.mark.parametrize("kind", ["input_audio", "file"])
def test_a_part_that_the_frontend_drops_is_refused_with_its_place(kind: str) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": kind, kind: {}}]
    error = refusal(CHAT, {**GOOD[CHAT], "messages": [{"role": "user", "content": parts}]})
    assert error.param == "messages[0].content[1].type"
    assert kind in error.message


@pytest.mark.parametrize("kind", ["image_url", "video_url"])
@pytest.mark.parametrize("url", ["https://h/x.png", "HTTP://h:8/x", "file:///x.png", "data:application/safetensors,x"])
def test_the_frontend_does_not_fetch_media(kind: str, url: str) -> None:
    parts = [{"type": "text", "text": "what?"}, {"type": kind, kind: {"url": url, "detail": "low"}}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    expected = [parts[0], {"type": kind, kind: {"url": f"baton:{url}", "detail": "low"}}]
    assert changed(CHAT, messages=messages) == {"messages": [messages[0], {"role": "user", "content": expected}]}


def test_the_frontend_does_not_fetch_media_of_responses() -> None:
    parts = [{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": "https://h/x.png"}]
    body: dict[str, object] = {"model": "m", "input": [{"role": "user", "content": parts}]}
    marked = [parts[0], {"type": "input_image", "image_url": "baton:https://h/x.png"}]
    assert prepare("/v1/responses", body)["input"] == [{"role": "user", "content": marked}]
    plain: dict[str, object] = {"model": "m", "input": "what?"}
    assert prepare("/v1/responses", plain) is plain


def test_the_frontend_may_read_images_in_data_urls() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": [_image("data:image/png;base64,AA")]}]}
    assert prepare(CHAT, body) is body


def _image(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_alternatives_need_logprobs() -> None:
    assert refusal(CHAT, {**GOOD[CHAT], "top_logprobs": 3}).param == "top_logprobs"
    assert changed(CHAT, top_logprobs=3, logprobs=True) == {"top_logprobs": 3, "logprobs": True}
    assert changed(CHAT, top_logprobs=0) == {"top_logprobs": 0}


def test_two_limits_are_refused() -> None:
    error = refusal(CHAT, {**GOOD[CHAT], "max_tokens": 3, "max_completion_tokens": 4})
    assert error.param == "max_tokens"


def test_stream_options_need_a_stream() -> None:
    options = {"include_usage": True, "include_obfuscation": False}
    assert refusal(CHAT, {**GOOD[CHAT], "stream_options": options}).param == "stream_options"
    kept = changed(CHAT, stream=True, stream_options=options)
    assert kept == {"stream": True, "stream_options": {"include_usage": True}}
    padded = {**GOOD[CHAT], "stream": True, "stream_options": {"include_obfuscation": True}}
    assert refusal(CHAT, padded).param == "stream_options.include_obfuscation"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_model_gets_the_allowed_tools_only(mode: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [TOOLS[1]]}}
    assert changed(CHAT, tools=TOOLS, tool_choice=choice) == {"tools": [TOOLS[1]], "tool_choice": mode}


WRONG = [
    ({"frobnicate": 1}, "frobnicate", "Unrecognized request argument supplied: frobnicate"),
    ({"max_tokens": "5"}, "max_tokens", "expected an integer, but got a string instead"),
    ({"max_tokens": True}, "max_tokens", "expected an integer, but got a boolean instead"),
    ({"temperature": 2.1}, "temperature", "Expected a value <= 2, but got 2.1 instead"),
    ({"n": 0}, "n", "integer below minimum value"),
    ({"stop": 5}, "stop", "expected one of a string or an array, but got an integer instead"),
    ({"stop": [str(number) for number in range(33)]}, "stop", "maximum length 32, but got one with length 33"),
    ({"messages": []}, "messages", "empty array"),
    ({"messages": None}, "messages", "expected an array, but got null instead"),
    ({"messages": [{"role": "x", "content": ""}]}, "messages[0].role", "Invalid value: 'x'. Supported values are:"),
    (
        {"messages": [{"role": "user", "content": [{"type": "x"}]}]},
        "messages[0].content[0].type",
        "'text', 'image_url'",
    ),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "Missing required parameter"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "Unknown parameter"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type", "Supported values are: 'function'"),
    ({"tool_choice": {"type": "x"}}, "tool_choice.type", "'function', 'allowed_tools'"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": ""}}},
        "response_format.json_schema.name",
        "empty",
    ),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "Unknown parameter"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "above maximum value"),
]


@pytest.mark.parametrize(("change", "param", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_value_is_refused_in_openais_words(change: dict[str, object], param: str, words: str) -> None:
    error = refusal(CHAT, {**GOOD[CHAT], **change})
    assert error.param == param
    assert words in error.message


def test_a_missing_field_is_named() -> None:
    error = refusal(CHAT, {"model": "m"})
    assert (error.param, error.message) == ("messages", "Missing required parameter: 'messages'.")


def test_a_body_that_is_no_object_is_refused() -> None:
    assert "expected an object, but got an array" in refusal(CHAT, [1]).message


@pytest.mark.parametrize(("path", "field"), [(COMPLETIONS, "prompt"), (EMBEDDINGS, "input")])
def test_a_list_of_unlike_items_is_refused(path: str, field: str) -> None:
    assert refusal(path, {**GOOD[path], field: ["x", 5]}).param == f"{field}[1]"
    assert refusal(path, {**GOOD[path], field: [-1]}).param == f"{field}[0]"
    assert refusal(path, {**GOOD[path], field: []}).param == field
    for good in (["x", "y"], [1, 2], [[1], [2]]):
        assert changed(path, **{field: good}) == {field: good}


def test_embeddings_refuse_unknown_fields_and_empty_inputs() -> None:
    assert refusal(EMBEDDINGS, {**GOOD[EMBEDDINGS], "input_type": "query"}).param == "input_type"
    assert refusal(EMBEDDINGS, {**GOOD[EMBEDDINGS], "input": ""}).param == "input"
    assert refusal(EMBEDDINGS, {**GOOD[EMBEDDINGS], "input": ["x", ""]}).param == "input[1]"


def with_image(source: object) -> dict[str, object]:
    content = [{"type": "text", "text": "Look"}, {"type": "image", "source": source}]
    return {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}


def test_an_anthropic_image_in_a_data_url_becomes_base64() -> None:
    inline = with_image({"type": "base64", "media_type": "image/png", "data": "AAAA"})
    assert prepare("/v1/messages", inline) is inline
    assert prepare("/v1/messages", with_image({"type": "url", "url": "data:image/png;base64,AAAA"})) == inline


def test_an_image_in_the_result_of_a_tool_becomes_base64_too() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {"type": "file"}}]}
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": [result]}]}
    assert refusal("/v1/messages", body).param == "messages[0].content[0].content[0].source.type"


@pytest.mark.parametrize(
    ("source", "param"),
    [
        ({"type": "url", "url": "https://a.example/b.png"}, "source.url"),
        ({"type": "file", "file_id": "x"}, "source.type"),
        ({"type": "base64", "data": "AAAA"}, "source.media_type"),
        (None, "source"),
    ],
)
def test_an_anthropic_image_that_is_not_in_the_request_is_refused_by_name(source: object, param: str) -> None:
    assert refusal("/v1/messages", with_image(source)).param == f"messages[0].content[1].{param}"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"steps": 0}, "diffusion.steps"),
        ({"steps": 1.5}, "diffusion.steps"),
        ({"block_length": 4096}, "diffusion.block_length"),
        ({"threshold": 1.5}, "diffusion.threshold"),
        ({"remasking": "random"}, "diffusion.remasking"),
        ({"noise": 1}, "diffusion.noise"),
        (5, "diffusion"),
    ],
)
def test_diffusion_options_are_checked_by_name(options: object, param: str) -> None:
    responses: dict[str, object] = {"model": "m", "input": "Hello"}
    for path, good in {CHAT: GOOD[CHAT], COMPLETIONS: GOOD[COMPLETIONS], "/v1/responses": responses}.items():
        assert refusal(path, {**good, "diffusion": options}).param == param
        accepted = {"remasking": "low_confidence_static", "block_length": 8, "steps": 2, "threshold": None}
        assert prepare(path, {**good, "diffusion": accepted})["diffusion"] == accepted
