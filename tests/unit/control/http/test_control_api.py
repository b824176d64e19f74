"""The control API over HTTP: every status, authorisation, and what is logged and counted."""

import asyncio
import base64
import logging
from pathlib import Path
from typing import Any

import pytest

from baton.config.load import control_token, load, to_environment
from baton.config.settings import Settings
from baton.control.http.command_table import COMMAND_PATHS, TENSOR_BODY_BYTES
from baton.errors import ConfigError, Conflict, EngineFailed, InvalidRequest
from baton.ports.engine import Capabilities
from baton.protocol.commands import FromTensors, Outcome, UpdateWeights
from baton.testing import eventually, run_bounded
from tests.unit.control.worker_harness import DONE, EVERYTHING, WorkerHarness, running_worker

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
POSTS = [entry.path for entry in COMMAND_PATHS if entry.method == "POST"]


def metric(text: str, start: str) -> float:
    [line] = [line for line in text.splitlines() if line.startswith(start)]
    return float(line.split()[-1])


@pytest.mark.parametrize("path", [entry.path for entry in COMMAND_PATHS])
def test_every_command_replies(path: str) -> None:
    method = next(entry.method for entry in COMMAND_PATHS if entry.path == path)

    async def main() -> None:
        async with running_worker(*[DONE] * 3) as harness:
            reply = await harness.send(path, BODIES.get(path) if method == "POST" else None, method)
            assert reply.status == 200, reply
            assert reply.headers["Content-Type"].startswith("application/json")

    run_bounded(main())


def test_an_outcome_has_only_the_fields_that_the_command_concerns() -> None:
    async def main() -> None:
        loaded = Outcome(message="loaded", adapters=("a", "b"))
        async with running_worker(loaded, loaded) as harness:
            assert await harness.ok("lora/load", BODIES["lora/load"]) == {"message": "loaded", "adapters": ["a", "b"]}
            assert (await harness.send("lora/list", method="GET")).body["adapters"] == ["a", "b"]

    run_bounded(main())


def test_status_has_every_field() -> None:
    async def main() -> None:
        async with running_worker() as harness:
            status = await harness.status()
            assert (status["weight_version"], status["paused"], status["released"]) == ("initial", False, [])
            assert (status["registered"], status["in_flight"], status["command"]) == (True, 0, None)
            assert status["capabilities"]["memory_tags"] == ["kv_cache", "weights"]

    run_bounded(main())


# 422


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
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
def test_a_body_that_does_not_fit_is_refused_with_the_name_of_the_field(
    path: str, body: Any, field: str | None
) -> None:
    async def main() -> None:
        async with running_worker() as harness:
            reply = await harness.send(path, body)
            assert reply.status == 422
            error = reply.body["error"]
            assert (error["code"], error.get("field")) == ("invalid_request", field)
            assert error["message"].startswith(path)
            assert not harness.engine.commands
            assert harness.serves()

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
        async with running_worker() as harness:
            reply = await harness.send(path, body)
            assert (reply.status, reply.body["error"]["field"]) == (422, field)
            assert f"`{field.split('.')[-1]}`" in reply.body["error"]["message"]
            assert not harness.engine.commands

    run_bounded(main())


def test_tensor_bytes_are_base64() -> None:
    tensor = {"name": "a", "dtype": "float32", "shape": [1], "data": base64.b64encode(b"\0\0\x80?").decode()}
    body = {"source": {"type": "tensors", "tensors": [tensor]}, "version": "1"}

    async def main() -> None:
        async with running_worker(DONE) as harness:
            await harness.ok("weights/update", body)
            [command] = harness.engine.commands
            assert isinstance(command, UpdateWeights)
            assert isinstance(command.source, FromTensors)
            assert command.source.tensors[0].data == b"\0\0\x80?"
            tensor["data"] = "%"
            assert "tensors[0].data" in await harness.refused("weights/update", body, 422)

    run_bounded(main())


# Other statuses


def test_invalid_json_and_a_refusal_of_the_engine_are_a_400() -> None:
    async def main() -> None:
        async with running_worker(InvalidRequest("no such group")) as harness:
            for junk in (b"{not json", b"\xff\xfe", b'{"mode": "keep"} x'):
                assert (await harness.http("POST", "/control/pause", junk)).status == 400
            assert await harness.refused("weights/group/leave", {"group": "g"}) == "no such group"

    run_bounded(main())


@pytest.mark.parametrize("path", [path for path in POSTS if path != "weights/version"])
def test_a_command_that_the_capabilities_do_not_cover_never_reaches_the_engine(path: str) -> None:
    async def main() -> None:
        async with running_worker(can=Capabilities()) as harness:
            await harness.refused(path, BODIES.get(path), 501, "unsupported")
            assert not harness.engine.commands
            assert harness.serves()

    run_bounded(main())


def test_an_unsupported_tag_mode_or_source_is_named() -> None:
    can = Capabilities(
        memory_tags=frozenset({"weights"}), pause_modes=frozenset({"keep"}), weight_sources=frozenset({"tensors"})
    )

    async def main() -> None:
        async with running_worker(can=can) as harness:
            message = await harness.refused("memory/release", {"tags": ["weights", "kv_cache"]}, 501, "unsupported")
            assert message == "tags: 'kv_cache' is not a memory tag of this engine; it has weights"
            message = await harness.refused("pause", {"mode": "abort"}, 501, "unsupported")
            assert message.endswith("it has drain, keep")
            assert "tensors" in await harness.refused("weights/update", FROM_DISK, 501, "unsupported")
            ipc = {"source": {"type": "ipc", "handles": {"0": "x"}}, "version": "1"}
            assert "'ipc'" in await harness.refused("weights/update", ipc, 501, "unsupported")

    run_bounded(main())


def test_drain_is_unsupported_where_the_engine_cannot_keep_requests() -> None:
    async def main() -> None:
        async with running_worker(can=Capabilities(pause_modes=frozenset({"abort"}))) as harness:
            await harness.refused("pause", {"mode": "drain"}, 501, "unsupported")

    run_bounded(main())


def test_a_conflict_is_a_409_and_a_failure_a_500() -> None:
    async def main() -> None:
        async with running_worker(
            Conflict("a profile is being recorded"), EngineFailed("disk full"), KeyError("a bug")
        ) as harness:
            await harness.refused("profile/start", BODIES["profile/start"], 409, "conflict")
            await harness.refused("cache/clear", None, 500, "engine_failed")
            await harness.refused("cache/clear", None, 500, "engine_failed")
            assert harness.serves()

    run_bounded(main())


def test_unknown_commands_are_a_404_and_wrong_methods_a_405() -> None:
    async def main() -> None:
        async with running_worker() as harness:
            await harness.refused("dance", {}, 404, "not_found")
            reply = await harness.send("pause", method="GET")
            assert (reply.status, reply.body["error"]["code"]) == (405, "method_not_allowed")
            assert reply.headers["Allow"] == "POST"
            assert (await harness.send("status")).status == 405
            assert (await harness.http("POST", "/health")).status == 405
            assert (await harness.http("GET", "/nothing")).body["error"]["code"] == "not_found"

    run_bounded(main())


@pytest.mark.parametrize("has_length", [True, False])
def test_a_body_that_is_too_large_is_refused(has_length: bool) -> None:
    async def chunks() -> Any:
        for _ in range(3):
            yield b" " * (1 << 19)

    async def main() -> None:
        async with running_worker(DONE) as harness:
            body: Any = b" " * ((1 << 20) + 1) if has_length else chunks()
            reply = await harness.http("POST", "/control/pause", body)
            assert (reply.status, reply.body["error"]["code"]) == (413, "too_large")
            large = b" " * ((1 << 20) + 1) + b'{"source": {"type": "disk", "path": "/m"}, "version": "2"}'
            assert len(large) < TENSOR_BODY_BYTES
            assert (await harness.http("POST", "/control/weights/update", large)).status == 200

    run_bounded(main())


# Authorisation


@pytest.mark.parametrize(
    ("settings", "accepts"),
    [({}, True), ({"system_host": "0.0.0.0"}, False), ({"system_host": "0.0.0.0", "control": "on"}, True),
     ({"control": "off"}, False), ({"system_host": "::1"}, True), ({"control": "off", "control_token": "t"}, False),
     ({"system_host": "0.0.0.0", "control_token": "t"}, True), ({"system_host": "10.0.0.1"}, False),
     ({"system_host": "0.0.0.0", "control_token_file": "/t"}, True)],
)  # fmt: skip
def test_commands_are_accepted_on_loopback_only_unless_configured(settings: dict[str, Any], accepts: bool) -> None:
    assert Settings(**settings).accepts_commands is accepts


def test_with_control_off_only_health_and_metrics_are_served() -> None:
    async def main() -> None:
        async with running_worker(control="off") as harness:
            for path in ("pause", "dance"):
                await harness.refused(path, {}, 404, "control_off")
            assert (await harness.http("GET", "/openapi.json")).status == 404
            for path in ("/live", "/health", "/metrics"):
                assert (await harness.http("GET", path)).status == 200

    run_bounded(main())


def test_d34_control_needs_its_token(caplog: pytest.LogCaptureFixture) -> None:
    async def calls(harness: WorkerHarness, **headers: str) -> list[int]:
        return [
            (await harness.send("pause", {}, **headers)).status,
            (await harness.send("status", method="GET", **headers)).status,
            (await harness.send("dance", {}, **headers)).status,
        ]

    async def main() -> None:
        async with running_worker(DONE, control_token="s3cret") as harness:
            assert await calls(harness) == [401, 401, 401]
            for wrong in ("Bearer wrong", "Bearer ", "Bearer", "s3cret", "Basic s3cret", "Bearer s3crets", "Bearer é"):
                assert await calls(harness, Authorization=wrong) == [401, 401, 401], wrong
            refusal = await harness.send("pause")
            assert refusal.headers["WWW-Authenticate"] == "Bearer"
            assert refusal.body["error"]["code"] == "unauthorized"
            assert harness.serves()
            assert not harness.engine.commands
            assert await calls(harness, Authorization="Bearer s3cret") == [200, 200, 404]
            for path in ("/live", "/metrics"):
                assert (await harness.http("GET", path)).status == 200
            assert (await harness.http("GET", "/health")).status == 503  # it is paused; health needs no token

    with caplog.at_level(logging.DEBUG):
        run_bounded(main())
    assert "s3cret" not in caplog.text


def test_commands_from_web_pages_are_refused() -> None:
    async def main() -> None:
        async with running_worker(DONE) as harness:
            reply = await harness.send("pause", {}, Origin="https://example.com")
            assert (reply.status, reply.body["error"]["code"]) == (403, "forbidden")
            assert harness.serves()

    run_bounded(main())


def test_a_token_is_read_from_a_file_and_passed_to_the_workers(tmp_path: Path) -> None:
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


# Logs and metrics


def test_every_request_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running_worker(DONE) as harness:
            await harness.ok("cache/clear")
            await harness.refused("pause", {"mode": "softly"}, 422)
            await harness.refused("dance", {}, 404, "not_found")
            await harness.refused("waltz", {}, 404, "not_found")
            text = (await harness.http("GET", "/metrics")).body
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


def test_a_client_that_disconnects_does_not_undo_a_command() -> None:
    async def main() -> None:
        proceed = asyncio.Event()
        async with running_worker(proceed, DONE, can=EVERYTHING) as harness:
            command = asyncio.create_task(harness.send("pause"))
            await eventually(lambda: bool(harness.engine.commands))
            command.cancel()
            await asyncio.wait([command])
            await asyncio.sleep(0.05)
            proceed.set()
            await eventually(lambda: harness.worker.health().state == "paused" and harness.engine.control_script == [])
            await asyncio.sleep(0.01)
            assert (await harness.status())["paused"]

    run_bounded(main())
