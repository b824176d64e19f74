"""The content of messages, in the shape that a chat template takes."""

from pathlib import Path

import pytest

from baton.errors import InvalidRequest, Unsupported
from baton.models.chat_template import ChatTemplate

PRINTS = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
ADDS = "{% for message in messages %}{{ '[' + message.role + ']' + message.content }}{% endfor %}"
READS_PARTS = (
    "{% for message in messages %}[{{ message.role }}]{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<{{ part.type }}>{% endif %}{% endfor %}{% endfor %}"
)
TAKES_BOTH = (
    "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<{{ part.type }}>{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)


LOOKS_AT_THE_FIRST_PART = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}|{% endfor %}"
)


def text(words: str) -> dict[str, object]:
    return {"type": "text", "text": words}


IMAGE: dict[str, object] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
VIDEO: dict[str, object] = {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}
AUDIO: dict[str, object] = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}

MIXED: list[dict[str, object]] = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": [text("one")]},
    {"role": "assistant", "content": [text("two"), text("three")]},
    {"role": "user", "content": "four"},
]


def render(template: str, messages: list[dict[str, object]]) -> str:
    return ChatTemplate(template, Path("test"), {}).render(messages)


@pytest.mark.parametrize("template", [PRINTS, ADDS, TAKES_BOTH], ids=["prints", "adds", "both"])
def test_d22_texts_and_lists_of_texts_mix_in_every_role(template: str) -> None:
    assert render(template, MIXED) == "[system]be short[user]one[assistant]two\nthree[user]four"


def test_d24_a_text_is_one_part_to_a_template_that_reads_parts() -> None:
    assert render(READS_PARTS, MIXED) == "[system]be short[user]one[assistant]twothree[user]four"


@pytest.mark.parametrize("template", [READS_PARTS, TAKES_BOTH], ids=["parts", "both"])
def test_media_keep_their_places_without_their_data(template: str) -> None:
    parts = [IMAGE, text("a"), VIDEO, text("b"), IMAGE, AUDIO]
    messages: list[dict[str, object]] = [{"role": "system", "content": "see"}, {"role": "user", "content": parts}]
    assert render(template, messages) == "[system]see[user]<image>a<video>b<image><audio>"


def test_a_template_that_looks_at_the_first_part_gets_parts_of_every_message() -> None:
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "see"},
        {"role": "user", "content": [IMAGE, text("what?")]},
        {"role": "assistant", "content": "a cat"},
    ]
    assert render(LOOKS_AT_THE_FIRST_PART, messages) == "System: see|User:<image>what?|Assistant: a cat|"


@pytest.mark.parametrize("template", [PRINTS, ADDS], ids=["prints", "adds"])
def test_media_are_refused_where_the_template_has_no_place_for_them(template: str) -> None:
    with pytest.raises(
        Unsupported, match=r"messages\[0\].content: the chat template .* no place for parts of type image"
    ):
        render(template, [{"role": "user", "content": [text("a"), IMAGE]}])


@pytest.mark.parametrize("parts", [["a"], [{}], [{"type": 1}], [{"type": "text"}], [{"type": "text", "text": 3}]])
def test_what_is_no_part_is_refused(parts: list[object]) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\]"):
        render(TAKES_BOTH, [{"role": "user", "content": parts}])


def test_arguments_of_tool_calls_are_objects_to_the_template() -> None:
    template = (
        "{{ messages[0].tool_calls[0].function.arguments.city }}{{ messages[0].tool_calls[1].function.arguments }}"
    )
    calls = [{"function": {"name": "f", "arguments": '{"city": "Bonn"}'}}, {"function": {"arguments": "no JSON"}}]
    assert render(template, [{"role": "assistant", "content": None, "tool_calls": calls}]) == "Bonnno JSON"
