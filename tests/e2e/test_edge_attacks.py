"""Requests that attack the HTTP of the edge: each gets one answer at most, no 5xx, and nobody else notices."""

import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from tests.e2e.attack_corpus import ADMIN, BODY, CHAT, CHUNKED, CLOSED, CORPUS, KEPT, LENGTH, MIB, REQUEST, SMUGGLED
from tests.e2e.harness import Serve, eventually
from tests.e2e.wire import Answer, Wire, head

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

SERVE = ("--body-limit-mb", "1")

SENTINEL = head("Connection: close", request="GET /v1/models HTTP/1.1", request_id="sentinel")


@pytest.fixture(autouse=True)
def _others_are_served(serve: Serve) -> Iterator[None]:
    """After each attack, another client gets its answer from the same processes."""
    before = serve.frontend().pid
    yield
    assert serve.post(CHAT, REQUEST)[0] == 200
    assert serve.frontend().pid == before


def answers_until_closed(wire: Wire) -> list[Answer]:
    answers = []
    while (answer := wire.answer()) is not None:
        answers.append(answer)
    return answers


def assert_unexpected_nothing(answer: Answer) -> None:
    assert answer.status < 500 or answer.status in {501, 505}, answer
    if answer.status >= 400:
        assert set(json.loads(answer.body)["error"]) == {"message", "type", "param", "code"}, answer
        assert answer.request_id


def memory(serve: Serve) -> int:
    return int(serve.frontend().memory_info().rss)


@pytest.mark.parametrize("kind", CORPUS)
def test_a_request_gets_one_answer_and_hides_no_other(serve: Serve, kind: str) -> None:
    data, outcomes = CORPUS[kind]
    with Wire(serve) as wire:
        wire.send(data)
        first = wire.answer()
        assert (first.status if first else CLOSED) in outcomes, first
        if first is not None:
            assert_unexpected_nothing(first)
            wire.send(SENTINEL)
        rest = answers_until_closed(wire)
    closes = first is None or first.headers.get("connection") == "close"
    # What follows a request of unknown length cannot be read; what follows any other is the next request.
    assert closes or first.status != 400 or kind in KEPT
    assert [answer.request_id for answer in rest] == ([] if closes else ["sentinel"])


@pytest.mark.parametrize("target", ADMIN)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_spelling_of_an_admin_route_comes_through(serve: Serve, target: str, method: str) -> None:
    body = b'{"model": "echo", "active_decode_blocks_threshold": 0.0}'
    with Wire(serve) as wire:
        wire.send(
            head(f"Content-Length: {len(body)}", "Connection: close", request=f"{method} {target} HTTP/1.1") + body
        )
        answer = wire.answer()
    assert answer is not None
    assert answer.status in {400, 401, 404, 405}
    assert_unexpected_nothing(answer)


def test_requests_that_are_sent_ahead_are_answered_in_turn(serve: Serve) -> None:
    requests = [
        head(LENGTH, request_id=f"chat-{number}") + BODY
        if number % 2
        else head(request="GET /v1/models HTTP/1.1", request_id=f"models-{number}")
        for number in range(20)
    ]
    with Wire(serve) as wire:
        wire.send(b"".join(requests))
        answers = [wire.answer("POST" if number % 2 else "GET") for number in range(20)]
    assert [answer and (answer.status, answer.request_id) for answer in answers] == [
        (200, f"chat-{number}" if number % 2 else f"models-{number}") for number in range(20)
    ]


def test_thousands_of_requests_ahead_are_answered_in_turn_or_refused(serve: Serve) -> None:
    before = memory(serve)
    with Wire(serve) as wire:
        wire.socket.settimeout(60)
        number = 0
        with suppress(TimeoutError):
            wire.send(b"".join(head(request="GET /v1/models HTTP/1.1", request_id=f"ahead-{n}") for n in range(5000)))
        while (answer := wire.answer("GET")) is not None and answer.status == 200:
            assert answer.request_id == f"ahead-{number}"
            number += 1
            if number == 5000:
                break
        assert answer is None or answer.status in {200, 400, 429}
    assert memory(serve) - before < 64 * MIB


def test_an_error_in_a_later_request_leaves_the_earlier_answers_whole(serve: Serve) -> None:
    with Wire(serve) as wire:
        wire.send(head(LENGTH, request_id="good") + BODY + b"GET / HTTP/1.1\r\nbad header\r\n\r\n" + SMUGGLED)
        answers = answers_until_closed(wire)
    assert [answer.status for answer in answers] == [200, 400]
    assert answers[0].request_id == "good"


@pytest.mark.parametrize("part", ["head", "body", "chunks"])
def test_half_a_request_disturbs_nobody(serve: Serve, part: str) -> None:
    half = {"head": head(LENGTH)[:-2], "body": head(LENGTH) + BODY[:-1], "chunks": head(CHUNKED) + b"5\r\n{"}[part]
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(serve)) for _ in range(50)]
        for wire in wires:
            wire.send(half)
        for _ in range(5):
            assert serve.post(CHAT, REQUEST)[0] == 200
        for wire in wires[:25]:
            wire.reset()
        for wire in wires[25:]:
            wire.finish_sending()
            answer = wire.answer()
            assert answer is None or answer.status in {400, 408}


def test_a_request_that_arrives_byte_by_byte_is_answered(serve: Serve) -> None:
    with Wire(serve) as wire:
        wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in head(LENGTH, "Connection: close") + BODY:
            wire.send(bytes([byte]))
        assert [answer.status for answer in answers_until_closed(wire)] == [200]


def test_a_client_that_closes_its_sending_side_leaves_nothing_behind(serve: Serve) -> None:
    body = json.dumps({**REQUEST, "max_tokens": 100_000, "stream": True}).encode()
    with Wire(serve) as wire:
        wire.send(head(f"Content-Length: {len(body)}") + body)
        wire.finish_sending()
        with suppress(OSError, AssertionError):
            wire.socket.recv(1)
    serve.assert_quiet()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_reset_during_an_answer_leaves_nothing_behind(serve: Serve, stream: bool) -> None:
    body = json.dumps({**REQUEST, "max_tokens": 1_000_000, "stream": stream}).encode()
    wire = Wire(serve)
    wire.send(head(f"Content-Length: {len(body)}") + body)
    if stream:
        wire.socket.recv(1)
    else:
        eventually(lambda: serve.load()["running"] > 0, what="the request runs")
    wire.reset()
    serve.assert_quiet()


def test_clients_that_do_not_read_take_no_memory(serve: Serve) -> None:
    before = memory(serve)
    body = {**REQUEST, "max_tokens": 100_000, "stream": True}
    streams = [serve.open(CHAT, body, receive_buffer=4096) for _ in range(4)]
    for stream in streams:
        stream.recv(1)
    for _ in range(5):
        assert serve.post(CHAT, REQUEST)[0] == 200
    assert memory(serve) - before < 64 * MIB
    for stream in streams:
        stream.close()
    serve.assert_quiet()


def test_large_bodies_and_heads_take_no_memory(serve: Serve) -> None:
    before = memory(serve)
    for _ in range(20):
        for kind in ("chunk: a body that does not end", "head: a huge value", "head: thousands of headers"):
            with Wire(serve) as wire:
                wire.send(CORPUS[kind][0])
                answers_until_closed(wire)
    assert memory(serve) - before < 32 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("part", ["nothing", "head", "body", "chunks"])
def test_half_a_request_is_refused_in_the_end(serve: Serve, part: str) -> None:
    halves = {
        "nothing": b"",
        "head": head(LENGTH)[:-2],
        "body": head(LENGTH) + BODY[:-1],
        "chunks": head(CHUNKED) + b"5\r\n",
    }
    with Wire(serve, timeout_s=110) as wire:
        wire.send(halves[part])
        answer = wire.answer()
        assert answer is None if part == "nothing" else answer is not None
        if answer is not None:
            assert answer.status == 408
            assert_unexpected_nothing(answer)
            assert wire.is_closed()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_head_that_grows_slowly_is_refused_in_the_end(serve: Serve) -> None:
    """A client that always sends a little more gains no more time by that."""
    with Wire(serve, timeout_s=1) as wire:
        wire.send(head(LENGTH)[:-2])

        def refused() -> bool:
            wire.send(b"X-Y: z\r\n")
            with suppress(TimeoutError):
                return wire.socket.recv(12) in {b"HTTP/1.1 408", b""}
            return False

        eventually(refused, 200, "the end of patience")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_thousand_idle_connections_disturb_nobody(serve: Serve) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, hard - 1000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    before, idle = memory(serve), []
    try:
        for number in range(count):
            connection = socket.create_connection(("127.0.0.1", serve.port), timeout=60)
            idle.append(connection)
            if number % 2:
                connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: loc")
            if number % 1000 == 0:
                assert serve.post(CHAT, REQUEST)[0] == 200
        assert serve.post(CHAT, REQUEST)[0] == 200
        assert memory(serve) - before < count * 16 * 1024
        # They may be closed to make room, but not served wrongly.
        idle[-1].sendall(b"alhost\r\n\r\n")
        assert idle[-1].recv(12) == b"HTTP/1.1 200"
    finally:
        for connection in idle:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    eventually(lambda: len(connections(serve)) < 100, 30, "the connections are closed")


def connections(serve: Serve) -> list[object]:
    return [each for each in serve.frontend().net_connections("tcp") if each.laddr and each.laddr.port == serve.port]


def test_afterwards_nothing_was_smuggled_and_nothing_is_left(serve: Serve) -> None:
    serve.assert_quiet()
    for process in ("frontend", "worker-0"):
        assert "smuggled" not in serve.log_of(process)
        assert "Traceback" not in serve.log_of(process)
    assert [serve.ended(state) for state in ("failed", "expired")] == [0, 0]
    assert serve.health() == 200
