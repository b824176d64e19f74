"""The first request of `baton serve`: it is answered, tried again, or fails with the reason of the endpoint."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from baton.config.settings import Settings
from baton.errors import EngineDead
from baton.testing import run_bounded
from baton.topology.own_endpoint import OwnEndpoint
from baton.topology.startup import send_first_request

Reply = tuple[int, bytes]


@asynccontextmanager
async def endpoint(replies: list[Reply], requests: list[bytes]) -> AsyncIterator[Settings]:
    """An HTTP endpoint that gives `replies` in turn, the last one again and again."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        requests.append(head + await reader.readexactly(length))
        status, body = replies.pop(0) if len(replies) > 1 else replies[0]
        writer.write(b"HTTP/1.0 %d Some\r\n\r\n%s" % (status, body) if status else b"")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Settings(engine="echo", name="mine,other", port=port)


def first_request(replies: list[Reply], retry_s: float = 10.0) -> list[bytes]:
    requests: list[bytes] = []

    async def body() -> None:
        async with endpoint(replies, requests) as settings:
            await send_first_request(OwnEndpoint(settings), settings, retry_s)

    run_bounded(body())
    return requests


def test_one_request_for_the_first_name_is_enough() -> None:
    [request] = first_request([(200, b"{}")])
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.0")
    assert json.loads(body)["model"] == "mine"
    assert json.loads(body)["max_tokens"] == 1


@pytest.mark.parametrize("status", [0, 404, 500, 503])
def test_a_request_that_fails_while_workers_are_connected_is_sent_again(status: int) -> None:
    assert len(first_request([(status, b""), (status, b""), (200, b"{}")])) == 3


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((503, b'{"message": "no worker"}'), "503 no worker"),
        ((500, b"oops\n"), "500 oops"),
        ((0, b""), "closed the connection without an answer"),
    ],
)
def test_a_request_that_fails_again_and_again_is_the_reason(reply: Reply, reason: str) -> None:
    assert reason in failure(lambda: first_request([reply], retry_s=0.0))


def test_a_refused_request_is_not_sent_again() -> None:
    requests: list[bytes] = []

    async def body() -> None:
        async with endpoint([(401, b'{"error": {"message": "no key"}}')], requests) as settings:
            await send_first_request(OwnEndpoint(settings), settings)

    assert "mine is registered, but a first request to /v1/completions failed: 401 no key" in failure(
        lambda: run_bounded(body())
    )
    assert len(requests) == 1


def failure(run: Callable[[], object]) -> str:
    with pytest.raises(EngineDead) as failed:
        run()
    return failed.value.message
