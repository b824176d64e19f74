"""Connections of clients: framing, keep-alive, pipelining, limits and what is refused."""

import asyncio
import json
import uuid

import pytest

from baton.edge.limits import EdgeLimits
from baton.edge.public_routes import public_routes
from baton.edge.upstream import UpstreamConnection, UpstreamPool
from baton.errors import BatonError
from baton.testing.bounded import eventually
from tests.unit.edge.stage import EVENTS_HEAD, Received, answering, chunk, get, on_uvloop, post, stage, whole

CHAT = "/v1/chat/completions"
CHUNKED = b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
QUESTION = b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}'


def error_of(body: bytes) -> dict[str, object]:
    error: dict[str, object] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def reply_never(request: Received, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@on_uvloop
async def test_a_request_and_its_answer_pass_unchanged() -> None:
    async with stage() as s:
        client = await s.connect()
        client.send(post(CHAT, b'{"a": 1}', "X-Other: b"))
        status, headers, body = await client.answer()
        assert (status, body) == (200, b'{"a": 1}')
        assert headers["content-type"] == "application/json"
        [received] = s.frontend.received
        assert (received.method, received.target, received.body) == ("POST", CHAT, b'{"a": 1}')
        assert received.headers["x-other"] == "b"
        assert received.headers["x-request-id"] == headers["x-request-id"]


@on_uvloop
async def test_connections_on_both_sides_are_used_again() -> None:
    async with stage() as s:
        client = await s.connect()
        for _ in range(3):
            client.send(post(CHAT, b"{}"))
            assert (await client.answer())[0] == 200
        assert s.frontend.connections <= 2  # one of them for the list of models


@pytest.mark.parametrize(("size", "status", "is_kept"), [(200_000, 415, False), (100, 415, True), (200_000, 200, True)])
@on_uvloop
async def test_a_connection_on_which_a_large_body_was_refused_is_not_used_again(
    size: int, status: int, is_kept: bool
) -> None:
    async with stage() as s:
        ends: list[asyncio.StreamWriter] = []

        async def reply(request: Received, writer: asyncio.StreamWriter) -> None:
            ends.append(writer)
            writer.write(whole(status, b"{}"))

        s.frontend.reply = reply
        client = await s.connect()
        client.send(post(CHAT, b" " * size))
        assert (await client.answer())[0] == status
        client.send(get("/live"))
        await client.answer()
        if is_kept:
            assert not ends[0].is_closing()
        else:
            await eventually(ends[0].is_closing)


@on_uvloop
async def test_pipelined_requests_are_answered_in_order() -> None:
    async with stage() as s:
        client = await s.connect()
        client.send(b"".join(post(CHAT, b'{"n": %d}' % number) for number in range(5)))
        assert [json.loads((await client.answer())[2])["n"] for _ in range(5)] == [0, 1, 2, 3, 4]


@on_uvloop
async def test_a_chunked_request_body_is_read_whole() -> None:
    async with stage() as s:
        client = await s.connect()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\n".encode() + CHUNKED
        client.send(head + chunk(b'{"a":') + chunk(b"1}") + b"0\r\nX-Trailer: 1\r\n\r\n")
        assert (await client.answer())[2] == b'{"a":1}'
        assert "x-trailer" not in s.frontend.received[0].headers


@on_uvloop
async def test_a_stream_passes_event_by_event() -> None:
    async with stage() as s:
        more = asyncio.Event()

        async def reply(request: Received, writer: asyncio.StreamWriter) -> None:
            writer.write(EVENTS_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: 2\n"))
            await more.wait()
            writer.write(chunk(b"\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

        s.frontend.reply = reply
        client = await s.connect()
        client.send(post(CHAT, b"{}"))
        assert b"data: 1\n\n\r\n" in await client.reader.readuntil(b"data: 1\n\n\r\n")
        more.set()
        rest = await client.reader.readuntil(b"0\r\n\r\n")
        assert rest.count(b"data: ") == 2


@on_uvloop
async def test_an_http_1_0_client_gets_a_stream_without_chunks() -> None:
    async with stage() as s:
        s.frontend.reply = answering(EVENTS_HEAD + chunk(b"data: 1\n\n") + b"0\r\n\r\n")
        client = await s.connect()
        client.send(f"POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        head, _, body = (await client.closed()).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert body == b"data: 1\n\n"


@on_uvloop
async def test_head_has_the_length_and_no_body() -> None:
    async with stage() as s:
        client = await s.connect()
        s.frontend.reply = answering(whole(200, b'{"live": true}'))
        client.send(get("/live").replace(b"GET", b"HEAD") + get("/live"))
        status, headers, _ = await client.answer(has_body=False)
        assert (status, headers["content-length"]) == (200, "14")
        assert (await client.answer())[2] == b'{"live": true}'


@on_uvloop
async def test_requests_without_an_id_get_uuids_that_differ() -> None:
    async with stage() as s:
        client = await s.connect()
        ids = []
        for _ in range(600):
            client.send(get("/live"))
            ids.append((await client.answer())[1]["x-request-id"])
        assert len(set(ids)) == 600
        assert {str(uuid.UUID(each)) for each in ids} == set(ids)
        assert {uuid.UUID(each).version for each in ids} == {4}


@on_uvloop
async def test_expect_continue_is_answered_before_the_body_is_sent() -> None:
    async with stage() as s:
        client = await s.connect()
        head, _, _ = post(CHAT, b"{}", "Expect: 100-continue").partition(b"\r\n\r\n")
        client.send(head + b"\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"{}")
        assert (await client.answer())[0] == 200
        assert "expect" not in s.frontend.received[0].headers


@on_uvloop
async def test_a_client_that_leaves_cancels_its_request() -> None:
    async with stage() as s:

        async def reply(request: Received, writer: asyncio.StreamWriter) -> None:
            writer.write(EVENTS_HEAD + chunk(b"data: 1\n\n"))
            await asyncio.Event().wait()

        s.frontend.reply = reply
        client = await s.connect()
        client.send(post(CHAT, b"{}"))
        await client.reader.readuntil(b"data: 1")
        client.writer.close()
        async with asyncio.timeout(10):
            await s.frontend.lost.wait()


@pytest.mark.parametrize("leaves", ["close", "write_eof"])
@pytest.mark.parametrize("first", [b"", get("/live")])
@on_uvloop
async def test_a_client_that_leaves_while_its_next_request_waits_cancels_the_first(leaves: str, first: bytes) -> None:
    async with stage() as s:
        taken = asyncio.Event()

        async def reply(request: Received, writer: asyncio.StreamWriter) -> None:
            if request.method == "GET":
                await asyncio.sleep(0.05)  # the others wait for it
                writer.write(whole(200, b"{}"))
                return
            taken.set()
            await asyncio.Event().wait()

        s.frontend.reply = reply
        client = await s.connect()
        client.send(first + post(CHAT, b"{}") + post(CHAT, b"{}"))
        await taken.wait()
        getattr(client.writer, leaves)()
        async with asyncio.timeout(10):
            await s.frontend.lost.wait()


@on_uvloop
async def test_requests_that_wait_are_bounded_while_reading_goes_on() -> None:
    async with stage() as s:
        go = asyncio.Event()

        async def reply(request: Received, writer: asyncio.StreamWriter) -> None:
            await go.wait()
            writer.write(whole(200, request.body))

        s.frontend.reply = reply
        client = await s.connect()
        for number in range(40):
            client.send(post(CHAT, b'"%d"' % number + b" " * (number % 2) * 70_000))
            await asyncio.sleep(0.002)
        go.set()
        assert [json.loads((await client.answer())[2]) for _ in range(40)] == [str(number) for number in range(40)]


@on_uvloop
async def test_a_client_that_does_not_read_stops_the_frontend() -> None:
    async with stage() as s:
        blocked = asyncio.Event()

        async def reply(request: Received, writer: asyncio.StreamWriter) -> None:
            writer.write(EVENTS_HEAD)
            data = chunk(b"data: " + b"x" * 60_000 + b"\n\n")
            for _ in range(1000):
                writer.write(data)
                try:
                    await asyncio.wait_for(writer.drain(), 1.0)
                except TimeoutError:
                    blocked.set()
                    await writer.drain()
            writer.write(b"0\r\n\r\n")

        s.frontend.reply = reply
        client = await s.connect()
        client.send(post(CHAT, b"{}"))
        await client.reader.readuntil(b"\r\n\r\n")
        client.writer.transport.pause_reading()
        async with asyncio.timeout(30):
            await blocked.wait()
        client.writer.transport.resume_reading()
        size = 0
        async with asyncio.timeout(30):
            while not (data := await client.reader.read(1 << 20)).endswith(b"0\r\n\r\n"):
                size += len(data)
        assert size > 59_000_000


@on_uvloop
async def test_a_client_that_does_not_read_holds_little_of_its_answer() -> None:
    """Also on connections that have carried much: the kernel gives those larger buffers."""
    async with stage() as s:
        event = chunk(b"data: " + b"x" * 200 + b"\n\n")
        sent = 0

        async def reply(request: Received, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            sent = 0
            writer.write(EVENTS_HEAD)
            while request.body == b'{"stalled":true}' or sent < 20_000_000:
                writer.write(event * 20)
                await writer.drain()
                sent += len(event) * 20
            writer.write(b"0\r\n\r\n")

        s.frontend.reply = reply
        client = await s.connect(receive_buffer=4096)
        client.send(post(CHAT, b"{}"))
        while not (await client.reader.read(1 << 20)).endswith(b"0\r\n\r\n"):
            pass
        client.send(post(CHAT, b'{"stalled":true}'))
        await client.reader.readuntil(b"\r\n\r\n")
        client.writer.transport.pause_reading()
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.5)
        assert sent < 4_000_000


@pytest.mark.parametrize(
    "data",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: +3\r\n\r\nabc",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\nabc",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + CHUNKED + b"3\nabc\n0\n\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + CHUNKED + b"3\r\nabcXX0\r\n\r\n",
        b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: a\r\nA: b\r\n c\r\n\r\n",
        b"GET /live HTTP/1.1\nHost: a\n\n",
        b"GET /live HTTP/1.1\r\nHost: a\nB: c\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost : a\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: a\x00b\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /live HTTP/1.1\r\n\r\n",
        b"GET /live HTTP/1.2\r\nHost: a\r\n\r\n",
        b"GET /live\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
@on_uvloop
async def test_what_can_be_read_in_two_ways_is_refused_and_the_connection_closed(data: bytes) -> None:
    async with stage() as s:
        client = await s.connect()
        client.send(data)
        status, headers, body = await client.answer()
        assert status == 400
        assert headers["connection"] == "close"
        assert headers["x-request-id"]
        assert error_of(body)["type"] == "invalid_request_error"
        client.send(get("/live"))
        assert await client.closed() == b""
        assert s.frontend.received == []


@on_uvloop
async def test_a_request_to_upgrade_is_served_as_it_is() -> None:
    async with stage() as s:
        client = await s.connect()
        client.send(post(CHAT, b"{}", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAM"))
        assert (await client.answer())[0] == 200
        client.send(post(CHAT, b"{}"))
        assert (await client.answer())[0] == 200
        assert not {"upgrade", "http2-settings", "connection"} & set(s.frontend.received[0].headers)


@on_uvloop
async def test_a_request_of_http_1_0_to_upgrade_is_answered_without_chunks() -> None:
    async with stage() as s:
        s.frontend.reply = answering(EVENTS_HEAD + chunk(b"data: 1\n\n") + b"0\r\n\r\n")
        client = await s.connect()
        client.send(post(CHAT, b"{}", "Connection: Upgrade", "Upgrade: h2c").replace(b"HTTP/1.1", b"HTTP/1.0"))
        status, headers, body = await client.answer()
        assert (status, headers["connection"], body) == (200, "close", b"data: 1\n\n")
        assert "transfer-encoding" not in headers


@on_uvloop
async def test_a_large_head_is_refused() -> None:
    async with stage(limits=EdgeLimits(head_bytes=4096)) as s:
        for head in (b"A: " + b"b" * 20_000, b"".join(b"A%d: b\r\n" % n for n in range(500)), b"c" * 50_000):
            client = await s.connect()
            client.send(b"GET /live HTTP/1.1\r\nHost: a\r\n" + head)
            status, _, body = await client.answer()
            assert (status, error_of(body)["code"]) == (431, "head_too_large")


@pytest.mark.parametrize("framing", ["Content-Length: 5000", "Transfer-Encoding: chunked"])
@on_uvloop
async def test_a_large_body_is_refused_while_it_arrives(framing: str) -> None:
    async with stage(limits=EdgeLimits(body_bytes=1000)) as s:
        client = await s.connect()
        client.send(f"POST {CHAT} HTTP/1.1\r\nContent-Type: application/json\r\nHost: a\r\n{framing}\r\n\r\n".encode())
        client.send(chunk(b"x" * 2000))
        status, _, body = await client.answer()
        assert (status, error_of(body)["code"]) == (413, "request_too_large")
        assert s.frontend.received == []


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /live HTTP/1.1\r\nHost:", 408),
        (post(CHAT, b"{       }")[:-1], 408),
    ],
)
@on_uvloop
async def test_a_slow_request_is_ended(data: bytes, status: int) -> None:
    async with stage(limits=EdgeLimits(head_timeout_s=0.1, body_timeout_s=0.1)) as s:
        client = await s.connect()
        client.send(data)
        assert (await client.answer())[0] == status
        assert await client.closed() == b""


@pytest.mark.parametrize(
    "part", ["GET /live HTTP/1.1\r\nHost:", "POST /live HTTP/1.1\r\nContent-Length: 9\r\nHost: a\r\n\r\n"]
)
@on_uvloop
async def test_half_a_request_behind_another_is_ended(part: str) -> None:
    async with stage(limits=EdgeLimits(head_timeout_s=0.1, body_timeout_s=0.1)) as s:
        client = await s.connect()
        client.send(post(CHAT, b"{}") + part.encode())
        assert (await client.answer())[0] == 200
        assert (await client.answer())[0] in (405, 408)
        assert await client.closed() == b""


@pytest.mark.parametrize("is_complete", [True, False])
@on_uvloop
async def test_a_client_that_never_reads_the_end_of_its_answer_is_closed(is_complete: bool) -> None:
    async with stage(limits=EdgeLimits(stall_timeout_s=0.1)) as s:

        async def reply(request: Received, writer: asyncio.StreamWriter) -> None:
            answer = EVENTS_HEAD + chunk(b"data: " + b"x" * 110_000 + b"\n\n")
            writer.write(answer + b"0\r\n\r\n" if is_complete else answer)
            await writer.drain()
            writer.close()

        s.frontend.reply = reply
        client = await s.connect(receive_buffer=4096)
        client.writer.transport.pause_reading()
        client.send(post(CHAT, b"{}", "Connection: close"))
        await eventually(lambda: s.frontend.received)
        await eventually(lambda: s.edge.counts.connections == 0)


@on_uvloop
async def test_a_head_behind_a_large_body_is_not_taken_for_a_large_head() -> None:
    async with stage(limits=EdgeLimits(head_bytes=4096)) as s:
        client = await s.connect()
        client.send(post(CHAT, b"[" + b"1," * 20_000 + b"1]") + b"GET /live HTTP/1.1\r\nHost:")
        assert (await client.answer())[0] == 200
        client.send(b" a\r\n\r\n")
        assert (await client.answer())[0] == 200


@on_uvloop
async def test_a_client_of_http_1_0_is_not_asked_for_a_body() -> None:
    async with stage() as s:
        client = await s.connect()
        client.send(post(CHAT, b"{}", "Expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    "head", ["", "Content-Type: text/plain\r\n", "Content-Type: text/x+json\r\n", "Content-Type: application/jsonx\r\n"]
)
@on_uvloop
async def test_a_large_body_of_another_type_than_json_is_refused_before_it_is_sent(head: str) -> None:
    async with stage() as s:
        client = await s.connect()
        client.send(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\n{head}Content-Length: 9000000\r\n\r\n".encode())
        status, headers, body = await client.answer()
        assert (status, headers["connection"]) == (415, "close")
        assert error_of(body)["code"] == "unsupported_media_type"
        assert s.frontend.received == []


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON ; charset=utf-8", "application/problem+json", "application/json;"]
)
@on_uvloop
async def test_every_type_of_json_is_served(kind: str) -> None:
    async with stage() as s:
        client = await s.connect()
        client.send(
            f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: {kind}\r\nContent-Length: 2\r\n\r\n{{}}".encode()
        )
        assert (await client.answer())[0] == 200
        assert s.frontend.received[0].headers["content-type"] == kind


@on_uvloop
async def test_an_idle_connection_is_closed() -> None:
    async with stage(limits=EdgeLimits(head_timeout_s=0.1, idle_timeout_s=0.1)) as s:
        client, silent = await s.connect(), await s.connect()
        client.send(get("/live"))
        assert (await client.answer())[0] == 200
        assert await client.closed() == b""
        assert await silent.closed() == b""


@on_uvloop
async def test_the_oldest_idle_connection_makes_room_for_a_new_one() -> None:
    async with stage(limits=EdgeLimits(max_connections=2)) as s:
        first, second = await s.connect(), await s.connect()
        second.send(get("/live"))
        assert (await second.answer())[0] == 200
        third = await s.connect()
        third.send(get("/live"))
        assert (await third.answer())[0] == 200
        assert await first.closed() == b""


@on_uvloop
async def test_requests_beyond_the_connections_of_the_edge_are_told_to_come_back() -> None:
    async with stage(limits=EdgeLimits(max_exchanges=2)) as s:
        go = asyncio.Event()

        async def reply(request: Received, writer: asyncio.StreamWriter) -> None:
            await go.wait()
            writer.write(whole(200, b"{}"))

        s.frontend.reply = reply
        first, *others = [await s.connect() for _ in range(4)]
        first.send(post(CHAT, b"{}"))
        await eventually(lambda: bool(s.frontend.received))
        for client in others:
            client.send(post(CHAT, b"{}"))
        answers = [asyncio.ensure_future(client.answer()) for client in others]
        # One of them may get the connection that lists models.
        await eventually(lambda: sum(answer.done() for answer in answers) >= 2)
        assert {answer.result()[0] for answer in answers if answer.done()} == {503}
        go.set()
        await asyncio.gather(*answers)
        assert (await first.answer())[0] == 200


@pytest.mark.parametrize("taken", [0, 1, 2])
@on_uvloop
async def test_a_request_of_many_prompts_takes_no_more_connections_than_are_left(taken: int) -> None:
    limits = EdgeLimits(max_exchanges=4)
    async with stage(limits=limits, routes=public_routes({}), lists_models=False) as s:
        go = asyncio.Event()
        most = 0
        prompt = {"prompt_token_ids": [1], "prompt_text": "a"}
        answer = {"choices": [{"index": 0, "text": ""}], "nvext": {"engine_data": prompt}}

        async def reply(request: Received, writer: asyncio.StreamWriter) -> None:
            nonlocal most
            most = max(most, s.edge.pool.open)
            if request.target == CHAT:
                await go.wait()
            await asyncio.sleep(0.01)
            writer.write(whole(200, json.dumps(answer).encode()))

        s.frontend.reply = reply
        for number in range(taken):
            (await s.connect()).send(post(CHAT, QUESTION))
            await eventually(lambda number=number: len(s.frontend.received) > number)
        client = await s.connect()
        body = {"model": "m", "prompt": [f"{number}" for number in range(40)], "max_tokens": 1, "echo": True}
        client.send(post("/v1/completions", json.dumps(body).encode()))
        status, _, content = await client.answer()
        assert (status, len(json.loads(content)["choices"])) == (200, 40)
        assert most <= limits.max_exchanges
        go.set()


@on_uvloop
async def test_a_request_of_many_prompts_is_refused_if_no_connection_is_left() -> None:
    async with stage(limits=EdgeLimits(max_exchanges=2), routes=public_routes({}), lists_models=False) as s:
        s.frontend.reply = reply_never
        for _ in range(2):
            (await s.connect()).send(post(CHAT, QUESTION))
        await eventually(lambda: len(s.frontend.received) == 2)
        client = await s.connect()
        client.send(post("/v1/completions", b'{"model": "m", "prompt": ["a", "b"], "max_tokens": 1, "echo": true}'))
        status, headers, body = await client.answer()
        assert (status, headers["retry-after"], error_of(body)["code"]) == (503, "1", "overloaded")


@on_uvloop
async def test_a_connection_that_has_just_been_opened_counts_once() -> None:
    async with stage() as s:
        pool = UpstreamPool("127.0.0.1", s.edge.pool.port)
        counts: list[int] = []

        class Opened:
            def on_connected(self, connection: UpstreamConnection) -> None:
                counts.append(pool.open)

            def on_lost(self, error: BatonError) -> None:
                raise error

        await pool.connect(Opened())
        assert counts == [pool.open] == [1]
        pool.close()


@on_uvloop
async def test_a_frontend_that_closes_the_connection_is_a_503_or_a_broken_stream() -> None:
    async with stage() as s:

        async def close(request: Received, writer: asyncio.StreamWriter) -> None:
            writer.close()

        s.frontend.reply = close
        client = await s.connect()
        client.send(post(CHAT, b"{}"))
        status, headers, body = await client.answer()
        assert (status, headers["retry-after"]) == (503, "1")
        assert error_of(body)["type"] == "server_error"

        async def close_within(request: Received, writer: asyncio.StreamWriter) -> None:
            writer.write(EVENTS_HEAD + chunk(b"data: 1\n\n"))
            await writer.drain()
            writer.close()

        s.frontend.reply = close_within
        client.send(post(CHAT, b"{}"))
        assert not (await client.closed()).endswith(b"0\r\n\r\n")


@on_uvloop
async def test_half_closed_clients_get_what_needs_no_computing() -> None:
    async with stage() as s:
        go = asyncio.Event()

        async def reply(request: Received, writer: asyncio.StreamWriter) -> None:
            await go.wait()
            writer.write(whole(200, b"{}"))

        s.frontend.reply = reply
        client = await s.connect()
        client.send(get("/live"))
        client.writer.write_eof()
        await eventually(lambda: bool(s.frontend.received))
        go.set()
        assert (await client.answer())[0] == 200
        go.clear()
        client = await s.connect()
        client.send(post(CHAT, b"{}"))
        client.writer.write_eof()
        async with asyncio.timeout(10):
            await s.frontend.lost.wait()
