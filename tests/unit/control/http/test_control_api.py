"""The operator's routes over HTTP: every status, who may call them, and what is told of each call."""

import asyncio
import base64
import logging
from pathlib import Path
from typing import Any

import pytest

from baton.config.load import control_token, load, to_environment
from baton.config.settings import Settings
from baton.control.http.command_table import ROUTES, TENSOR_BODY_BYTES
from baton.errors import ConfigError, Conflict, EngineFailed, InvalidRequest
from baton.ports.engine import Capabilities
from baton.protocol.commands import FromTensors, Outcome, UpdateWeights
from baton.testing import eventually, run_bounded
from tests.unit.control.operated import DONE, EVERYTHING, House, living

FROM_DISK = {"source": {"type": "disk", "path": "/m"}, "version": "2"}
OUTSIDE = {"type": "shared_memory", "segment": "../x", "tensors": []}
JOIN = {"group": "g", "host": "127.0.0.1", "port": 1234, "rank": 1, "size": 2}
BODIES: dict[str, Any] = {
    "memory/release": {"tags": ["weights"]},
    "memory/resume": {"tags": ["weights"]},
    "weights/update": FROM_DISK,
    "weights/group/join": JOIN,
    "weights/group/leave": {"group": "g"},
    "weights/version": {"version": "7"},
    "profile/start": {"directory": "/p"},
    "lora/load": {"name": "a", "path": "/a"},
    "lora/unload": {"name": "a"},
}
POSTS = [route.path for route in ROUTES if route.method == "POST"]


def metric(text: str, start: str) -> float:
    [line] = [line for line in text.splitlines() if line.startswith(start)]
    return float(line.split()[-1])


@pytest.mark.parametrize("path", [route.path for route in ROUTES])
def test_every_route_answers(path: str) -> None:
    method = next(route.method for route in ROUTES if route.path == path)

    async def main() -> None:
        async with living(*[DONE] * 3) as house:
            reply = await house.order(path, BODIES.get(path) if method == "POST" else None, method)
            assert reply.status == 200, reply
            assert reply.headers["Content-Type"].startswith("application/json")

    run_bounded(main())


def test_an_outcome_has_what_the_verb_concerns_and_no_more() -> None:
    async def main() -> None:
        loaded = Outcome(message="loaded", adapters=("a", "b"))
        async with living(loaded, loaded) as house:
            assert await house.ok("lora/load", BODIES["lora/load"]) == {"message": "loaded", "adapters": ["a", "b"]}
            assert (await house.order("lora/list", method="GET")).body["adapters"] == ["a", "b"]

    run_bounded(main())


def test_status_tells_everything_at_rest() -> None:
    async def main() -> None:
        async with living() as house:
            status = await house.status()
            assert (status["weight_version"], status["paused"], status["released"]) == ("initial", False, [])
            assert (status["registered"], status["in_flight"], status["command"]) == (True, 0, None)
            assert status["capabilities"]["memory_tags"] == ["kv_cache", "weights"]

    run_bounded(main())


# 422


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("memory/release", {}, "tags"),
        ("memory/release", {"tags": []}, "tags"),
        ("memory/release", {"tags": "weights"}, "tags"),
        ("memory/release", {"tags": ["weights", 3]}, "tags[1]"),
        ("pause", {"mode": "gently"}, "mode"),
        ("pause", {"timeout_s": 0}, "timeout_s"),
        ("pause", [], None),
        ("pause", 3, None),
        ("profile/start", {"directory": "/p", "steps": 0}, "steps"),
        ("profile/start", {"directory": "/p", "steps": "3"}, "steps"),
        ("weights/update", {"source": {"type": "disk", "path": "/m"}}, "version"),
        ("weights/update", {"source": {"type": "url", "path": "/m"}, "version": "1"}, "source.type"),
        ("weights/update", {"source": {"type": "disk"}, "version": "1"}, "source.path"),
        ("weights/update", {"source": OUTSIDE, "version": "1"}, "source.segment"),
        ("weights/version", {}, "version"),
        ("weights/version", {"version": ""}, "version"),
        ("weights/group/join", {**JOIN, "rank": 0}, "rank"),
        ("weights/group/leave", {"group": 3}, "group"),
        ("lora/load", {"name": "a"}, "path"),
    ],
)  # fmt: skip
def test_a_body_that_does_not_fit_is_refused_by_the_name_of_the_field(path: str, body: Any, field: str | None) -> None:
    async def main() -> None:
        async with living() as house:
            reply = await house.order(path, body)
            assert reply.status == 422
            error = reply.body["error"]
            assert (error["code"], error.get("field")) == ("invalid_request", field)
            assert error["message"].startswith(path)
            assert not house.engine.verbs
            assert house.serves()

    run_bounded(main())


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("pause", {"mood": "keep"}, "mood"),
        ("continue", {"mode": "keep"}, "mode"),
        ("memory/release", {"tags": ["weights"], "tag": "x"}, "tag"),
        ("weights/update", {"source": {"type": "disk", "path": "/m", "url": "x"}, "version": "1"}, "source.url"),
    ],
)
def test_d34_unknown_fields_are_refused_by_name(path: str, body: Any, field: str) -> None:
    async def main() -> None:
        async with living() as house:
            reply = await house.order(path, body)
            assert (reply.status, reply.body["error"]["field"]) == (422, field)
            assert f"`{field.split('.')[-1]}`" in reply.body["error"]["message"]
            assert not house.engine.verbs

    run_bounded(main())


def test_bytes_come_as_base64() -> None:
    tensor = {"name": "a", "dtype": "float32", "shape": [1], "data": base64.b64encode(b"\0\0\x80?").decode()}
    body = {"source": {"type": "tensors", "tensors": [tensor]}, "version": "1"}

    async def main() -> None:
        async with living(DONE) as house:
            await house.ok("weights/update", body)
            [command] = house.engine.verbs
            assert isinstance(command, UpdateWeights)
            assert isinstance(command.source, FromTensors)
            assert command.source.tensors[0].data == b"\0\0\x80?"
            tensor["data"] = "%"
            assert "tensors[0].data" in await house.refused("weights/update", body, 422)

    run_bounded(main())


# The others


def test_what_is_no_json_and_what_the_engine_refuses_is_a_400() -> None:
    async def main() -> None:
        async with living(InvalidRequest("no such group")) as house:
            for junk in (b"{not json", b"\xff\xfe", b'{"mode": "keep"} x'):
                assert (await house.http("POST", "/control/pause", junk)).status == 400
            assert await house.refused("weights/group/leave", {"group": "g"}) == "no such group"

    run_bounded(main())


@pytest.mark.parametrize("path", [path for path in POSTS if path != "weights/version"])
def test_an_engine_is_asked_for_nothing_that_it_does_not_list(path: str) -> None:
    async def main() -> None:
        async with living(can=Capabilities()) as house:
            await house.refused(path, BODIES.get(path), 501, "unsupported")
            assert not house.engine.verbs
            assert house.serves()

    run_bounded(main())


def test_a_tag_a_mode_and_a_source_that_are_not_listed_are_named() -> None:
    can = Capabilities(
        memory_tags=frozenset({"weights"}), pause_modes=frozenset({"keep"}), weight_sources=frozenset({"tensors"})
    )

    async def main() -> None:
        async with living(can=can) as house:
            message = await house.refused("memory/release", {"tags": ["weights", "kv_cache"]}, 501, "unsupported")
            assert message == "tags: 'kv_cache' is no memory that can be released of this engine; it has weights"
            message = await house.refused("pause", {"mode": "abort"}, 501, "unsupported")
            assert message.endswith("it has drain, keep")
            assert "tensors" in await house.refused("weights/update", FROM_DISK, 501, "unsupported")
            ipc = {"source": {"type": "ipc", "handles": {"0": "x"}}, "version": "1"}
            assert "'ipc'" in await house.refused("weights/update", ipc, 501, "unsupported")

    run_bounded(main())


def test_draining_is_not_offered_where_nothing_can_be_kept() -> None:
    async def main() -> None:
        async with living(can=Capabilities(pause_modes=frozenset({"abort"}))) as house:
            await house.refused("pause", {"mode": "drain"}, 501, "unsupported")

    run_bounded(main())


def test_what_contradicts_the_present_state_is_a_409_and_what_failed_a_500() -> None:
    async def main() -> None:
        async with living(
            Conflict("a profile is being recorded"), EngineFailed("disk full"), KeyError("a bug")
        ) as house:
            await house.refused("profile/start", BODIES["profile/start"], 409, "conflict")
            await house.refused("cache/clear", None, 500, "engine_failed")
            await house.refused("cache/clear", None, 500, "engine_failed")
            assert house.serves()

    run_bounded(main())


def test_unknown_verbs_and_wrong_methods_are_told_apart() -> None:
    async def main() -> None:
        async with living() as house:
            await house.refused("dance", {}, 404, "not_found")
            reply = await house.order("pause", method="GET")
            assert (reply.status, reply.body["error"]["code"]) == (405, "method_not_allowed")
            assert reply.headers["Allow"] == "POST"
            assert (await house.order("status")).status == 405
            assert (await house.http("POST", "/health")).status == 405
            assert (await house.http("GET", "/nothing")).body["error"]["code"] == "not_found"

    run_bounded(main())


@pytest.mark.parametrize("told", [True, False])
def test_a_body_that_is_too_large_is_refused(told: bool) -> None:
    async def chunks() -> Any:
        for _ in range(3):
            yield b" " * (1 << 19)

    async def main() -> None:
        async with living(DONE) as house:
            body: Any = b" " * ((1 << 20) + 1) if told else chunks()
            reply = await house.http("POST", "/control/pause", body)
            assert (reply.status, reply.body["error"]["code"]) == (413, "too_large")
            large = b" " * ((1 << 20) + 1) + b'{"source": {"type": "disk", "path": "/m"}, "version": "2"}'
            assert len(large) < TENSOR_BODY_BYTES
            assert (await house.http("POST", "/control/weights/update", large)).status == 200

    run_bounded(main())


# Who may


@pytest.mark.parametrize(
    ("settings", "open_to"),
    [({}, True), ({"system_host": "0.0.0.0"}, False), ({"system_host": "0.0.0.0", "control": "on"}, True),
     ({"control": "off"}, False), ({"system_host": "::1"}, True), ({"control": "off", "control_token": "t"}, False),
     ({"system_host": "0.0.0.0", "control_token": "t"}, True), ({"system_host": "10.0.0.1"}, False),
     ({"system_host": "0.0.0.0", "control_token_file": "/t"}, True)],
)  # fmt: skip
def test_orders_are_taken_from_this_machine_only_unless_told_otherwise(settings: dict[str, Any], open_to: bool) -> None:
    assert Settings(**settings).accepts_commands is open_to


def test_a_worker_without_control_has_no_routes_but_is_seen() -> None:
    async def main() -> None:
        async with living(control="off") as house:
            for path in ("pause", "dance"):
                await house.refused(path, {}, 404, "control_off")
            assert (await house.http("GET", "/openapi.json")).status == 404
            for path in ("/live", "/health", "/metrics"):
                assert (await house.http("GET", path)).status == 200

    run_bounded(main())


def test_d34_control_needs_its_token(caplog: pytest.LogCaptureFixture) -> None:
    async def calls(house: House, **headers: str) -> list[int]:
        return [
            (await house.order("pause", {}, **headers)).status,
            (await house.order("status", method="GET", **headers)).status,
            (await house.order("dance", {}, **headers)).status,
        ]

    async def main() -> None:
        async with living(DONE, control_token="s3cret") as house:
            assert await calls(house) == [401, 401, 401]
            for wrong in ("Bearer wrong", "Bearer ", "Bearer", "s3cret", "Basic s3cret", "Bearer s3crets", "Bearer é"):
                assert await calls(house, Authorization=wrong) == [401, 401, 401], wrong
            refusal = await house.order("pause")
            assert refusal.headers["WWW-Authenticate"] == "Bearer"
            assert refusal.body["error"]["code"] == "unauthorized"
            assert house.serves()
            assert not house.engine.verbs
            assert await calls(house, Authorization="Bearer s3cret") == [200, 200, 404]
            for path in ("/live", "/metrics"):
                assert (await house.http("GET", path)).status == 200
            assert (await house.http("GET", "/health")).status == 503  # it is paused, and that may be known

    with caplog.at_level(logging.DEBUG):
        run_bounded(main())
    assert "s3cret" not in caplog.text


def test_web_pages_give_no_orders() -> None:
    async def main() -> None:
        async with living(DONE) as house:
            reply = await house.order("pause", {}, Origin="https://example.com")
            assert (reply.status, reply.body["error"]["code"]) == (403, "forbidden")
            assert house.serves()

    run_bounded(main())


def test_a_token_comes_from_a_file_and_reaches_the_workers(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    settings = load({"control_token_file": str(file)}, {}, None)
    assert control_token(settings) == "s3cret"
    assert "s3cret" not in repr(settings)
    assert control_token(load({}, to_environment(settings), None)) == "s3cret"
    given = load({"control_token": "t"}, {}, None)
    assert load({}, to_environment(given), None).control_token == "t"


@pytest.mark.parametrize("content", ["", " \n", None])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="control-token-file"):
        control_token(Settings(control_token_file=str(file)))
    with pytest.raises(ConfigError, match="drop one"):
        control_token(Settings(control_token_file=str(file), control_token="t"))


# What is told


def test_every_call_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with living(DONE) as house:
            await house.ok("cache/clear")
            await house.refused("pause", {"mode": "softly"}, 422)
            await house.refused("dance", {}, 404, "not_found")
            await house.refused("waltz", {}, 404, "not_found")
            text = (await house.http("GET", "/metrics")).body
            assert metric(text, 'baton_commands_total{command="cache/clear",outcome="ok"}') == 1
            assert metric(text, 'baton_commands_total{command="pause",outcome="invalid_request"}') == 1
            assert metric(text, 'baton_commands_total{command="unknown",outcome="not_found"}') == 2
            assert metric(text, 'baton_command_seconds_count{command="cache/clear"}') == 1

    with caplog.at_level(logging.INFO, logger="baton.control.http.control_api"):
        run_bounded(main())
    lines = [line for line in caplog.messages if line.startswith("control: ")]
    assert len(lines) == 4
    assert lines[0].startswith("control: cache/clear from 127.0.0.1 in ")
    assert lines[0].endswith(": ok")
    assert "invalid_request: pause: Invalid enum value 'softly'" in lines[1]


def test_a_caller_who_hangs_up_does_not_undo_an_order() -> None:
    async def main() -> None:
        at_it = asyncio.Event()
        async with living(at_it, DONE, can=EVERYTHING) as house:
            order = asyncio.create_task(house.order("pause"))
            await eventually(lambda: bool(house.engine.verbs))
            order.cancel()
            await asyncio.wait([order])
            await asyncio.sleep(0.05)
            at_it.set()
            await eventually(lambda: house.worker.health().state == "paused" and house.engine.control_script == [])
            await asyncio.sleep(0.01)
            assert (await house.status())["paused"]

    run_bounded(main())
