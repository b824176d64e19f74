"""Clients of the disaggregation bench: one request at a time or several, each event with its time."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

import msgspec

HOST = "127.0.0.1"
ANSWER_S = 120.0
DIGITS = 5
DATA = b"data: "
DONE = b"data: [DONE]"


class ClientFailed(Exception):
    """An answer that is not one."""


class Timed(msgspec.Struct, frozen=True):
    """One streamed answer: when it was asked for, and when each event with text came."""

    asked_at: float
    events: list[float]

    @property
    def first_s(self) -> float:
        return round(self.events[0] - self.asked_at, DIGITS)

    @property
    def gaps_s(self) -> list[float]:
        return [round(later - earlier, DIGITS) for earlier, later in pairwise(self.events)]


def request_bytes(model: str, prompt: Sequence[int], tokens: int, trace_id: str = "") -> bytes:
    """A streamed completion; workers log what they do for it under `trace_id`."""
    body = json.dumps(
        {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0.0,
            "stream": True,
            "ignore_eos": True,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
    head += f"traceparent: 00-{trace_id}-{trace_id[:16]}-01\r\n" if trace_id else ""
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def asked(port: int, request: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request and hang up at the end of the block, whatever has come by then."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(request)
        await writer.drain()
        yield reader
    finally:
        writer.transport.abort()


async def next_event(reader: asyncio.StreamReader) -> bytes:
    """The next line of the answer that is an event; b"" at its end. Raises ClientFailed for an error."""
    while line := await reader.readline():
        if line.startswith(DONE):
            return b""
        if line.startswith(DATA):
            return line
        if line.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5", b"event: error")):
            raise ClientFailed(line.decode().strip())
    raise ClientFailed("the answer ended early")


async def ask(port: int, request: bytes) -> Timed:
    """One whole answer."""
    asked_at = time.perf_counter()
    events: list[float] = []
    async with asyncio.timeout(ANSWER_S), asked(port, request) as reader:
        while line := await next_event(reader):
            if b'"text":""' not in line:
                events.append(time.perf_counter())
    if not events:
        raise ClientFailed("no text")
    return Timed(asked_at, events)


async def leave(port: int, request: bytes, after_s: float, after_events: int) -> float:
    """Ask, wait for some events and then for a while, hang up; return when, by the clock on the wall."""
    async with asyncio.timeout(ANSWER_S), asked(port, request) as reader:
        for _ in range(after_events):
            await next_event(reader)
        await asyncio.sleep(after_s)
        return time.time()
