"""The prompt for engines that place media themselves: only the placeholders of the request's items stay."""

import pytest

from baton.errors import InvalidRequest
from baton.handlers.placed_prompt import plain_prompt
from baton.ports.engine import MediaInfo, Placeholder
from baton.ports.transfer import EmbeddingShape
from baton.protocol.codec import decode_request
from baton.protocol.requests import GenerateRequest

IMAGE, VIDEO = 90, 91
MEDIA = MediaInfo(
    shape=EmbeddingShape(model="m", dtype="float32", size=4),
    placeholders={
        "image": Placeholder(token=IMAGE, text="<image>", as_text=(1, 2)),
        "video": Placeholder(token=VIDEO, text="<video>", as_text=(3,)),
    },
)


def request(tokens: list[int], images: int, *parts: str) -> GenerateRequest:
    """Return a request whose message has these parts: the text of one, or "" for an image."""
    content = [{"type": "text", "text": part} if part else {"type": "image_url"} for part in parts]
    media = {"image_url": ["data:,"] * images} if images else {}
    extra = {"messages": [{"role": "user", "content": content}]}
    return decode_request({"token_ids": tokens, "multi_modal_data": media, "extra_args": extra})


def test_d26_typed_placeholders_become_text_by_position() -> None:
    assert plain_prompt(request([IMAGE, 5, IMAGE], 1, "<image>", "x", ""), MEDIA) == (1, 2, 5, IMAGE)
    assert plain_prompt(request([IMAGE, 5, IMAGE], 1, "", "x", "<image>"), MEDIA) == (IMAGE, 5, 1, 2)
    assert plain_prompt(request([IMAGE, VIDEO], 1, "", "<video>"), MEDIA) == (IMAGE, 3)


def test_other_prompts_stay_as_they_are() -> None:
    assert plain_prompt(request([5, IMAGE, 6], 1, "", "x"), MEDIA) == (5, IMAGE, 6)
    assert plain_prompt(request([IMAGE, IMAGE], 1, ""), None) == (IMAGE, IMAGE), "the placeholders are unknown"
    assert plain_prompt(request([5, 6], 1, ""), MEDIA) == (5, 6), "a template with another placeholder"


def test_placeholders_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="2 placeholders '<image>' for 1 items"):
        plain_prompt(request([IMAGE, IMAGE], 1, ""), MEDIA)
