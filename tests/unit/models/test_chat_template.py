"""Chat templates take messages as clients of OpenAI write them, and say why they refuse some."""

import json
from pathlib import Path

import pytest

from baton.engines.echo.engine import MODEL_DIR
from baton.errors import InvalidRequest
from baton.models.chat_template import ChatTemplate, Message, load_chat_template
from baton.models.demo import DEMOS

CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
LOOP: list[Message] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "Sunny"},
]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, Path("template"), {})


def smollm2() -> ChatTemplate:
    source = DEMOS["smollm2"].settings["tokenizer_config.json"]["chat_template"]
    assert isinstance(source, str)
    return template(source)


@pytest.mark.parametrize("absent", [False, True], ids=["null", "absent"])
@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content }}/{% endfor %}",
        "{% for m in messages %}{{ m['content'] + '/' }}{% endfor %}",
        "{% for m in messages %}{{ (m.content | trim) + '/' }}{% endfor %}",
        "{% for m in messages %}{{ '' if m['content'] is none else m['content'] }}/{% endfor %}",
    ],
)
def test_content_may_be_null(source: str, absent: bool) -> None:
    messages = [{key: value for key, value in message.items() if value or not absent} for message in LOOP]
    assert template(source).render(messages) == "Weather?//Sunny/"


def test_a_template_that_expects_null_gets_null() -> None:
    source = (
        "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.name }}{% endif %}{% endfor %}"
    )
    assert template(source).render(LOOP) == "get_weather"


def test_the_reason_of_a_refusal_is_the_one_of_the_template() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    with pytest.raises(InvalidRequest, match=r"messages: .*System role not supported"):
        template(source).render([{"role": "system", "content": None}])


def test_json_in_a_prompt_is_not_escaped_for_html() -> None:
    assert template("{{ messages[0] | tojson(indent=1) }}").render([{"content": "<é>'"}]) == '{\n "content": "<é>\'"\n}'


def test_special_tokens_are_texts(tmp_path: Path) -> None:
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": source}))
    loaded = load_chat_template(tmp_path)
    assert loaded is not None
    assert loaded.render([{"role": "user", "content": "hi"}]) == "<s>hi</s>"


def test_the_template_of_the_echo_model_takes_null() -> None:
    loaded = load_chat_template(MODEL_DIR)
    assert loaded is not None
    assert loaded.render(LOOP) == "Weather?\n\nSunny"


def test_the_template_of_the_demo_model_is_that_of_smollm2_with_tools() -> None:
    user = "<|im_start|>user\nWeather?<|im_end|>\n"
    default = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert smollm2().render(LOOP[:1]) == f"{default}<|im_end|>\n{user}<|im_start|>assistant\n"
    own: Message = {"role": "system", "content": "Be brief."}
    prompt = smollm2().render([own, *LOOP[:1]], {"add_generation_prompt": False})
    assert prompt == f"<|im_start|>system\nBe brief.<|im_end|>\n{user}"
    prompt = smollm2().render(LOOP, {"tools": TOOLS})
    assert f"<tools>\n{json.dumps(TOOLS[0]['function'])}\n</tools>" in prompt
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>" in prompt
    assert "None" not in prompt


def test_the_demo_model_takes_arguments_as_text_and_as_an_object() -> None:
    parsed = {**CALL, "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages = [LOOP[0], {"role": "assistant", "tool_calls": [CALL, parsed]}]
    first, second = smollm2().render(messages).split("<tool_call>\n")[1:]
    assert first.splitlines()[0] == second.splitlines()[0] == '{"name": "get_weather", "arguments": {"city": "Paris"}}'
