"""Many clients at once, slow ones, some that never read: each gets the right text and nobody waits for another."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.harness import Serve, echoed, error_in, events, eventually

pytestmark = pytest.mark.e2e

SERVE = ("--echo-pace-ms", "5")
CHAT = "/v1/chat/completions"


def body(prompt: str, tokens: int, **more: object) -> dict[str, object]:
    return {"model": "echo", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, **more}


async def stream_text(serve: Serve, prompts: list[str], tokens: int) -> list[str]:
    async with serve.async_client() as client:

        async def one(prompt: str) -> str:
            chunks = await client.chat.completions.create(**body(prompt, tokens, stream=True))
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        return await asyncio.gather(*(one(prompt) for prompt in prompts))


@pytest.mark.slow
def test_300_streams_at_once_all_get_their_own_text(serve: Serve) -> None:
    prompts = [f"stream {number} says its own name. " for number in range(300)]
    before = serve.ended("completed")
    assert asyncio.run(stream_text(serve, prompts, 120)) == [echoed(prompt, 120) for prompt in prompts]
    serve.assert_quiet()
    assert serve.ended("completed") == before + 300


def test_300_whole_answers_at_once_are_all_right(serve: Serve) -> None:
    prompts = [f"request {number} says its own name. " for number in range(300)]

    async def run() -> list[str | None]:
        async with serve.async_client() as client:
            answers = await asyncio.gather(*(client.chat.completions.create(**body(prompt, 60)) for prompt in prompts))
            return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(run()) == [echoed(prompt, 60) for prompt in prompts]
    serve.assert_quiet()


@pytest.fixture(scope="module")
def flat_out(start_shared: Callable[..., Serve]) -> Iterator[Serve]:
    """An engine that makes tokens as fast as it can, and sends each in a chunk of its own."""
    serve = start_shared(Serve, "--flush-interval-ms", "0")
    yield serve
    serve.stop()


def test_slow_readers_get_everything(flat_out: Serve) -> None:
    prompt, tokens = "a slow reader misses nothing. ", 80_000
    # Into a smaller buffer the kernel now and then sends two segments per delayed acknowledgement: 30 KB a second.
    connections = [flat_out.open(CHAT, body(prompt, tokens, stream=True), receive_buffer=65_536) for _ in range(4)]
    received = [b""] * len(connections)
    ended = [False] * len(connections)
    try:
        while not all(ended):
            # A bit from each, then a pause: the streams are written faster than they are read.
            for number, connection in enumerate(connections):
                if not ended[number]:
                    received[number] += connection.recv(8192)
                    ended[number] = received[number].endswith(b"\r\n0\r\n\r\n")
            time.sleep(0.002)
    finally:
        for connection in connections:
            connection.close()
    assert [text_of(data) == echoed(prompt, tokens) for data in received] == [True] * len(connections)
    flat_out.assert_quiet()


@pytest.mark.parametrize("n", [1, 16])
def test_a_reader_that_never_reads_a_huge_stream_delays_nobody(flat_out: Serve, n: int) -> None:
    pid = flat_out.worker().pid
    before = flat_out.ended("cancelled")
    with flat_out.open(CHAT, body("never read. ", 1_000_000, stream=True, n=n), receive_buffer=4096):
        eventually(lambda: flat_out.load()["in_flight"] == 1, what="the unread stream runs")
        for _ in range(3):
            prompts = [f"reader {number} goes on. " for number in range(20)]
            texts = asyncio.run(asyncio.wait_for(stream_text(flat_out, prompts, 200), 60))
            assert texts == [echoed(prompt, 200) for prompt in prompts]
        assert flat_out.health() == 200
    flat_out.assert_quiet(30)
    assert flat_out.worker().pid == pid
    assert flat_out.ended("cancelled") + flat_out.ended("completed") > before


@pytest.mark.slow
def test_a_reader_that_does_not_read_for_too_long_is_dropped(start: Callable[..., Serve]) -> None:
    # Sixteen choices of a token a millisecond fill what the runtime holds for an unread stream within seconds.
    serve = start(Serve, "--flush-interval-ms", "0", "--echo-pace-ms", "1", "--reader-stall-timeout-s", "1")
    with serve.open(CHAT, body("never read. ", 1_000_000, stream=True, n=16), receive_buffer=4096):
        eventually(lambda: serve.load()["in_flight"] == 1, what="the unread stream runs")
        eventually(lambda: serve.metric("baton_errors_total", code="reader_stalled") == 1, 60, "the worker gives it up")
        serve.assert_quiet()
    status, _ = serve.post(CHAT, body("next", 4))
    assert status == 200
    serve.stop()


@pytest.fixture(scope="module")
def small(start_shared: Callable[..., Serve]) -> Iterator[Serve]:
    """A worker that takes two requests at a time."""
    serve = start_shared(Serve, "--max-in-flight", "2", "--echo-pace-ms", "10")
    yield serve
    serve.stop()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_is_over_the_limit_is_refused_until_there_is_room(small: Serve, stream: bool) -> None:
    pid = small.worker().pid
    with small.open(CHAT, body("one", 20_000, stream=True)), small.open(CHAT, body("two", 20_000)):
        eventually(lambda: small.load()["in_flight"] == 2, what="the worker is full")
        status, text = small.post(CHAT, body("three", 4, stream=stream))
        assert (status, error_in(text)["type"]) == (503, "server_error")
        assert small.load()["in_flight"] == 2
    small.assert_quiet()
    status, text = small.post(CHAT, body("four", 4, stream=stream))
    assert status == 200
    assert small.worker().pid == pid
    assert small.ended("refused") > 0
    assert small.ended("failed") == 0


def test_requests_that_do_not_fit_into_the_cache_wait_for_room(start: Callable[..., Serve]) -> None:
    # Room for one request of 100 tokens at a time.
    serve = start(Serve, "--echo-blocks", "8")
    prompts = [f"{number} waits for its turn. " for number in range(20)]
    texts = asyncio.run(asyncio.wait_for(stream_text(serve, prompts, 80), 60))
    assert texts == [echoed(prompt, 80) for prompt in prompts]
    status, text = serve.post(CHAT, body("too much", 200))
    assert status == 400
    assert "KV blocks" in error_in(text)["message"]
    serve.assert_quiet()
    serve.stop()


def text_of(answer: bytes) -> str:
    """Return the text of a whole streamed answer, as it came over the wire."""
    _, _, chunked = answer.partition(b"\r\n\r\n")
    plain = b""
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        plain, chunked = plain + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    chunks = [json.loads(data) for _, data in events(plain.decode()) if data != "[DONE]"]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
