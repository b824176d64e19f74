"""Client of the multimodal benchmark: pictures, chat requests with them, and the times of their streamed responses."""

import asyncio
import base64
import io
import json
import random
import time
from collections.abc import Sequence

from bench.disagg_client import HOST, RESPONSE_TIMEOUT_S, ClientFailed, TimedResponse, next_event, opened
from bench.multimodal_system import MODEL_NAME
from tools.smolsee.pictures import draw, make_scene

PICTURE_SIZE = 384
QUESTION = "What is in this picture?"


class Pictures:
    """Drawn pictures as PNG files, none of them used before."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def make(self, count: int) -> list[bytes]:
        return [self._draw() for _ in range(count)]

    def _draw(self) -> bytes:
        file = io.BytesIO()
        draw(make_scene(self._chance), self._chance, PICTURE_SIZE).save(file, "PNG")
        return file.getvalue()


def image_request(label: str, pictures: Sequence[bytes], tokens: int = 1) -> bytes:
    """A streamed chat request. `label` comes before the pictures: a new one keeps their KV out of the prefix cache."""
    urls = ["data:image/png;base64," + base64.b64encode(picture).decode() for picture in pictures]
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return _request([{"type": "text", "text": f"{label}: "}, *images, {"type": "text", "text": QUESTION}], tokens)


def text_request(text: str, tokens: int) -> bytes:
    return _request(text, tokens)


def _request(content: object, tokens: int) -> bytes:
    """A request for exactly so many tokens."""
    body = json.dumps(
        {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": tokens,
            "min_tokens": tokens,
            "temperature": 0.0,
            "stream": True,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def stream_chat(port: int, request: bytes) -> TimedResponse:
    """Read one whole response. Its last event counts even if its token has no text."""
    sent_at = time.perf_counter()
    events: list[float] = []
    async with asyncio.timeout(RESPONSE_TIMEOUT_S), opened(port, request) as reader:
        while line := await next_event(reader):
            if has_token(line):
                events.append(time.perf_counter())
    if not events:
        raise ClientFailed("no tokens")
    return TimedResponse(sent_at, events)


def has_token(event: bytes) -> bool:
    """Whether an event has text or ends the response."""
    return (b'"content":"' in event and b'"content":""' not in event) or b'"finish_reason":"' in event
