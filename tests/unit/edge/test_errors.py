"""Errors as clients see them."""

import asyncio
import json

import msgspec
import pytest

from baton.edge.models import KnownModels
from baton.edge.routes import ROUTES, Json
from baton.timelines.ring import TimelineRing
from tests.unit.edge.stage import EVENTS_HEAD, Received, answering, chunk, get, on_uvloop, post, stage, whole
from tests.unit.edge.test_connection import CHAT, error_of

MISSING = whole(404, b'{"message":"Model not found","type":"Not Found","code":404}')


@pytest.mark.parametrize(
    ("answer", "status", "type_", "message"),
    [
        (whole(400, b'{"message":"n: too many","code":400}'), 400, "invalid_request_error", "n: too many"),
        (whole(500, b'{"message":"Internal server error","code":500}'), 500, "server_error", "Internal server error"),
        (whole(503, b"", "text/plain"), 503, "server_error", "the request has failed with status 503"),
        (whole(415, b"Expected JSON", "text/plain"), 415, "invalid_request_error", "Expected JSON"),
        (whole(429, b'{"message":"busy"}'), 429, "rate_limit_error", "busy"),
    ],
)  # fmt: skip
@on_uvloop
async def test_every_answer_that_is_no_success_has_the_envelope(
    answer: bytes, status: int, type_: str, message: str
) -> None:
    async with stage() as s:
        s.frontend.reply = answering(answer)
        client = await s.connect()
        client.send(post(CHAT, b"{}"))
        got, headers, body = await client.answer()
        error = error_of(body)
        assert (got, error["type"], error["message"]) == (status, type_, message)
        assert headers["content-type"] == "application/json"
        assert ("retry-after" in headers) == (status in (429, 503))


@on_uvloop
async def test_routes_of_anthropic_have_its_envelope() -> None:
    async with stage() as s:
        s.frontend.reply = answering(whole(400, b'{"message":"messages: missing"}'))
        client = await s.connect()
        client.send(post("/v1/messages", b"{}", "X-Request-Id: abc"))
        _, _, body = await client.answer()
        error = {"type": "invalid_request_error", "message": "messages: missing"}
        assert json.loads(body) == {"type": "error", "error": error, "request_id": "abc"}


@pytest.mark.parametrize(
    ("reason", "status", "message", "code"),
    [
        ("prompt token id 258 is out of range", 400, "prompt token id 258 is out of range", None),
        ("deadline_exceeded: it took longer than 2 s", 504, "it took longer than 2 s", "deadline_exceeded"),
        ("engine_failed: out of memory", 500, "out of memory", "engine_failed"),
        (None, 400, "Invalid request", None),
    ],
)
@on_uvloop
async def test_the_reason_in_the_log_replaces_a_fixed_text(
    reason: str | None, status: int, message: str, code: str | None
) -> None:
    async with stage(reasons={"abc": reason}) as s:
        s.frontend.reply = answering(whole(400, b'{"message":"Invalid request","code":400}'))
        client = await s.connect()
        client.send(post(CHAT, b"{}", "x-request-id: abc"))
        got, _, body = await client.answer()
        assert (got, error_of(body)["message"], error_of(body)["code"]) == (status, message, code)


@on_uvloop
async def test_a_reason_that_no_worker_gave_is_not_shown_with_a_5xx() -> None:
    async with stage(reasons={"abc": "connect to 10.0.0.7:4711 failed"}) as s:
        s.frontend.reply = answering(whole(500, b'{"message":"Internal server error","code":500}'))
        client = await s.connect()
        client.send(post(CHAT, b"{}", "x-request-id: abc"))
        assert b"10.0.0.7" not in (await client.answer())[2]


@pytest.mark.parametrize("cut", range(0, 60, 7))
@on_uvloop
async def test_an_error_event_is_rewritten_wherever_the_network_cuts_it(cut: int) -> None:
    async with stage(reasons={"abc": "engine_failed: gone"}) as s:
        event = b'data: {"error":{"message":"Internal server error","type":"x","code":500}}\n\n'

        async def reply(request: Received, writer: asyncio.StreamWriter) -> None:
            writer.write(EVENTS_HEAD + chunk(b"data: 1\n\n"))
            if cut:
                writer.write(chunk(event[:cut]))
            await asyncio.sleep(0.001)
            writer.write(chunk(event[cut:]) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

        s.frontend.reply = reply
        client = await s.connect()
        client.send(post(CHAT, b"{}", "x-request-id: abc"))
        status, _, body = await client.answer()
        first, error, done, end = body.split(b"\n\n")
        assert (status, first, done, end) == (200, b"data: 1", b"data: [DONE]", b"")
        expected = {"message": "gone", "type": "server_error", "param": None, "code": "engine_failed"}
        assert json.loads(error.removeprefix(b"data: ")) == {"error": expected}


@pytest.mark.parametrize("text", ["event: error", "\nevent: error\n", 'data: {"error"', 'data: {"type":"error"'])
@on_uvloop
async def test_a_text_that_reads_like_an_error_event_passes_unchanged(text: str) -> None:
    async with stage() as s:
        deltas = [{"type": "response.output_text.delta", "delta": text}, {"choices": [{"delta": {"content": text}}]}]
        sent = b"".join(b"event: delta\ndata: %b\n\n" % msgspec.json.encode(delta) for delta in deltas)
        s.frontend.reply = answering(EVENTS_HEAD + chunk(sent) + b"0\r\n\r\n")
        client = await s.connect()
        client.send(post("/v1/responses", b"{}"))
        assert (await client.answer())[2] == sent


@on_uvloop
async def test_an_unknown_model_is_named_with_those_that_are_served() -> None:
    async with stage() as s:
        s.frontend.reply = answering(MISSING)
        s.frontend.models = ["one", "two"]
        client = await s.connect()
        client.send(post(CHAT, b'{"model": "three"}'))
        status, _, body = await client.answer()
        error = error_of(body)
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"] == "the model 'three' does not exist: this deployment serves 'one', 'two'"


@on_uvloop
async def test_a_model_that_is_served_elsewhere_is_not_said_to_be_unknown() -> None:
    async with stage(configured=("echo",)) as s:
        s.frontend.reply = answering(MISSING)
        client = await s.connect()
        client.send(post("/v1/embeddings", b'{"model": "echo"}'))
        status, _, body = await client.answer()
        assert (status, error_of(body)["message"]) == (404, "the model 'echo' does not serve /v1/embeddings")


@on_uvloop
async def test_a_configured_model_without_workers_is_unavailable_for_the_moment() -> None:
    async with stage(configured=("echo",)) as s:
        s.frontend.reply = answering(MISSING)
        s.frontend.models = []
        client = await s.connect()
        client.send(post(CHAT, b'{"model": "echo"}'))
        status, headers, body = await client.answer()
        assert (status, headers["retry-after"], error_of(body)["code"]) == (503, "2", "model_unavailable")


def test_a_model_that_was_listed_is_unavailable_when_a_worker_has_gone() -> None:
    models = KnownModels((), 60.0)
    models.update(("base", "adapter"), frozenset((1, 2)), 0.0)
    models.update(("base",), frozenset((1, 2)), 1.0)
    assert models.missing("adapter", CHAT).status == 404  # its workers are there: it was unloaded
    models.update(("other",), frozenset((2, 3)), 2.0)
    assert models.missing("base", CHAT).status == 503
    models.update(("other",), frozenset((2, 3)), 100.0)
    assert models.missing("base", CHAT).status == 404


@pytest.mark.parametrize(("data", "status"), [(get("/v1/nothing"), 404), (get(CHAT), 405), (get("/docs"), 404)])
@on_uvloop
async def test_unknown_paths_and_wrong_methods_have_the_envelope(data: bytes, status: int) -> None:
    async with stage() as s:
        client = await s.connect()
        client.send(data)
        got, headers, body = await client.answer()
        assert got == status
        assert error_of(body)["message"]
        assert headers.get("allow") == ("POST" if status == 405 else None)


@on_uvloop
async def test_an_answer_that_cannot_be_translated_is_an_error_and_not_a_wait() -> None:
    def fail(path: str, body: Json) -> Json:
        raise KeyError("choices")

    routes = tuple(msgspec.structs.replace(each, normalise=fail) if each.path == CHAT else each for each in ROUTES)
    ring = TimelineRing(10, "frontend")
    async with stage(routes=routes, timelines=ring) as s:
        client = await s.connect()
        client.send(post(CHAT, b'{"model": "echo"}'))
        status, _, body = await client.answer()
        assert (status, error_of(body)["code"]) == (500, "internal")
        assert ring.running == 0


@on_uvloop
async def test_a_model_that_cannot_be_looked_up_is_an_error_and_not_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise KeyError("data")

    ring = TimelineRing(10, "frontend")
    async with stage(timelines=ring) as s:
        monkeypatch.setattr(s.edge.models, "explain_missing", fail)
        s.frontend.reply = answering(MISSING)
        client = await s.connect()
        client.send(post(CHAT, b'{"model": "other"}'))
        status, _, body = await client.answer()
        assert (status, error_of(body)["code"]) == (500, "internal")
        assert ring.running == 0
