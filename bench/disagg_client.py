"""HTTP client of the disaggregation benchmark: streams completions and times every event."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

import msgspec

HOST = "127.0.0.1"
RESPONSE_TIMEOUT_S = 120.0
DIGITS = 5
DATA = b"data: "
DONE = b"data: [DONE]"


class ClientFailed(Exception):
    """A response with an error, without text or without its end."""


class TimedResponse(msgspec.Struct, frozen=True):
    """One streamed response: when its request was sent and when each event with text arrived."""

    sent_at: float
    events: list[float]

    @property
    def first_s(self) -> float:
        return round(self.events[0] - self.sent_at, DIGITS)

    @property
    def gaps_s(self) -> list[float]:
        return [round(later - earlier, DIGITS) for earlier, later in pairwise(self.events)]


def request_bytes(model: str, prompt: Sequence[int], tokens: int, trace_id: str = "") -> bytes:
    """A streamed completion request. Workers log `trace_id` with it."""
    body = json.dumps(
        {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "stream": True,
            "ignore_eos": True,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
    head += f"traceparent: 00-{trace_id}-{trace_id[:16]}-01\r\n" if trace_id else ""
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def opened(port: int, request: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request, and abort the connection at the end of the block."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(request)
        await writer.drain()
        yield reader
    finally:
        writer.transport.abort()


async def next_event(reader: asyncio.StreamReader) -> bytes:
    """The next event line of the response; b"" at its end. Raises ClientFailed for an error."""
    while line := await reader.readline():
        if line.startswith(DONE):
            return b""
        if line.startswith(DATA):
            return line
        if line.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5", b"event: error")):
            raise ClientFailed(line.decode().strip())
    raise ClientFailed("the response ended early")


async def stream_completion(port: int, request: bytes) -> TimedResponse:
    """Read one whole response."""
    sent_at = time.perf_counter()
    events: list[float] = []
    async with asyncio.timeout(RESPONSE_TIMEOUT_S), opened(port, request) as reader:
        while line := await next_event(reader):
            if b'"text":""' not in line:
                events.append(time.perf_counter())
    if not events:
        raise ClientFailed("no text")
    return TimedResponse(sent_at, events)


async def disconnect(port: int, request: bytes, after_s: float, after_events: int) -> float:
    """Send, read `after_events` events, wait `after_s`, disconnect; return the wall-clock time of the disconnect."""
    async with asyncio.timeout(RESPONSE_TIMEOUT_S), opened(port, request) as reader:
        for _ in range(after_events):
            await next_event(reader)
        await asyncio.sleep(after_s)
        return time.time()
