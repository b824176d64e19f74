"""`baton ctl` against a real system server: the command it sends, its output and its exit code."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from baton.cli.ctl import ctl
from baton.control.http.command_table import COMMAND_PATHS
from baton.control.http.token_file import published_token
from baton.control.process_entries import published_entry, read_entries
from baton.protocol.commands import (
    Command,
    FromDisk,
    Outcome,
    Pause,
    ReleaseMemory,
    SetWeightVersion,
    StartProfile,
    UpdateWeights,
)
from baton.testing import run_bounded
from tests.unit.control.worker_harness import DONE, TOKEN, WorkerHarness, running_worker

UPDATE = '{"source": {"type": "disk", "path": "/m"}, "version": "v2"}'


async def run(*args: str, token: str | None = TOKEN, **variables: str) -> Result:
    given = {**variables, "BATON_CONTROL_TOKEN": token}
    return await asyncio.to_thread(CliRunner().invoke, ctl, args, env=given)


def sent(harness: WorkerHarness) -> Command:
    return harness.engine.commands[-1]


@pytest.mark.parametrize(
    ("args", "command"),
    [
        (("memory/release", "--tags", "kv_cache,weights"), ReleaseMemory(tags=("kv_cache", "weights"))),
        (("memory/release", "--tags=weights"), ReleaseMemory(tags=("weights",))),
        (("memory/release",), ReleaseMemory(tags=("kv_cache", "weights"))),
        (("pause",), Pause()),
        (("/pause", "--mode", "retract"), Pause(mode="retract")),
        (("weights/update", UPDATE), UpdateWeights(source=FromDisk(path="/m"), version="v2")),
        (
            ("weights/update", "--source", '{"type": "disk", "path": "/m"}', "--version", "v2"),
            UpdateWeights(source=FromDisk(path="/m"), version="v2"),
        ),
        (("weights/version", "--version", "v3"), SetWeightVersion(version="v3")),
        (("profile/start", "--directory", "/p", "--steps", "5"), StartProfile(directory="/p", steps=5)),
    ],
)
def test_arguments_become_the_command(args: tuple[str, ...], command: Command) -> None:
    async def main() -> None:
        async with running_worker(*[DONE] * 2) as harness:
            result = await run(str(harness.server.port), *args)
            assert result.exit_code == 0, result.output
            assert sent(harness) == command

    run_bounded(main())


def test_replies_are_text_or_json() -> None:
    async def main() -> None:
        async with running_worker(Outcome(message="loaded", adapters=("a", "b")), DONE) as harness:
            port = str(harness.server.port)
            result = await run(port, "lora/list")
            assert result.stdout.splitlines() == ["loaded", "adapters: a, b"]
            status = (await run(port, "status")).stdout
            assert "weight_version: initial" in status
            assert "released: none" in status
            assert "registered: yes" in status
            assert "  pause_modes: abort, keep, retract" in status
            assert json.loads((await run(port, "status", "--json")).stdout)["paused"] is False
            assert (await run(port, "weights/version")).stdout.startswith("the weight version is initial")

    run_bounded(main())


@pytest.mark.parametrize(
    "form", ["{port}", ":{port}", "127.0.0.1:{port}", "http://127.0.0.1:{port}", "http://localhost:{port}/"]
)
def test_a_worker_is_named_by_port_address_or_url(form: str) -> None:
    async def main() -> None:
        async with running_worker() as harness:
            assert (await run(form.format(port=harness.server.port), "status")).exit_code == 0

    run_bounded(main())


def test_a_worker_is_found_by_its_name(tmp_path: Path) -> None:
    directory, cache = tmp_path / "baton" / "processes", {"XDG_CACHE_HOME": str(tmp_path)}

    async def main() -> None:
        async with running_worker() as harness:
            with published_entry(directory, "8000/worker-0", f"http://127.0.0.1:{harness.server.port}"):
                for name in ("worker-0", "8000/worker-0"):
                    assert (await run(name, "status", **cache)).exit_code == 0
                listed = (await run("list", **cache)).stdout.splitlines()
                assert listed[0].split() == ["NAME", "ROLE", "MODEL", "STATE", "REQUESTS", "ADDRESS"]
                assert listed[1].split()[0] == "8000/worker-0"
                assert listed[1].split()[-1] == f"http://127.0.0.1:{harness.server.port}"
                unknown = await run("worker-1", "status", **cache)
                assert (unknown.exit_code, "8000/worker-0" in unknown.stderr) == (2, True)

    run_bounded(main())


def test_workers_of_several_deployments_with_one_name_are_told_apart(tmp_path: Path) -> None:
    directory, cache = tmp_path / "baton" / "processes", {"XDG_CACHE_HOME": str(tmp_path)}

    async def main() -> None:
        async with running_worker() as harness:
            url = f"http://127.0.0.1:{harness.server.port}"
            with published_entry(directory, "8000/worker-0", url):
                other = msgspec.structs.replace(read_entries(directory)[0], name="8001/worker-0")
                (directory / "other.json").write_bytes(msgspec.json.encode(other))
                several = await run("worker-0", "status", **cache)
                assert several.exit_code == 2
                assert "8000/worker-0 or 8001/worker-0" in " ".join(several.stderr.split())
                assert (await run("8001/worker-0", "status", **cache)).exit_code == 0

    run_bounded(main())


def test_without_workers_the_list_says_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(ctl, ["list"], env={"XDG_CACHE_HOME": str(tmp_path)})
    assert (result.exit_code, result.stdout) == (0, "no worker of this user runs on this machine\n")
    assert CliRunner().invoke(ctl, ["9090"]).exit_code == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("dance",), "no command 'dance'"),
        (("pause", "--mood", "keep"), "no field '--mood'; it has mode, timeout_s"),
        (("pause", "--mode"), "--mode needs a value"),
        (("pause", "--mode", "softly"), "softly"),
        (("pause", "{not json"), "JSON"),
        (("pause", '{"mood": 1}'), "mood"),
        (("profile/start", "--directory", "/p", "--steps", "many"), "steps"),
        (("weights/update", "--source", "disk", "--version", "1"), "not JSON"),
        (("status", "--mode", "keep"), "no fields"),
        (("continue", "now"), "JSON"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(args: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(ctl, ["1", *args])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_an_unreachable_worker_is_an_error() -> None:
    assert CliRunner().invoke(ctl, ["somewhere", "status"]).exit_code == 2
    result = CliRunner().invoke(ctl, ["1", "status"])
    assert result.exit_code == 1
    assert "cannot reach http://127.0.0.1:1" in result.stderr
    broken = CliRunner().invoke(ctl, ["http://[::1", "status"])
    assert (broken.exit_code, broken.stderr.startswith("baton: cannot reach http://[::1/")) == (1, True)


def test_a_refusal_prints_the_workers_message() -> None:
    async def main() -> None:
        async with running_worker() as harness:
            result = await run(str(harness.server.port), "memory/release", "--tags", "cuda_graph")
            assert (result.exit_code, result.stdout) == (1, "")
            assert result.stderr.startswith("baton: unsupported: tags: 'cuda_graph'")

    run_bounded(main())


def test_the_token_is_read_from_flag_or_environment() -> None:
    async def main() -> None:
        async with running_worker(control_token="s3cret") as harness:
            port = str(harness.server.port)
            result = await run(port, "status", token=None)
            assert (result.exit_code, "unauthorized" in result.stderr) == (1, True)
            assert "BATON_CONTROL_TOKEN" in result.stderr
            assert (await run(port, "status", "--token", "s3cret", token=None)).exit_code == 0
            assert (await run(port, "status", token="s3cret")).exit_code == 0

    run_bounded(main())


@pytest.mark.parametrize("form", ["{port}", "localhost:{port}", "http://127.0.0.1:{port}/"])
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_generated_token_is_found(form: str, address: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with running_worker() as harness:
            port, cache = harness.server.port, {"XDG_CACHE_HOME": str(tmp_path)}
            worker = form.format(port=port)
            assert (await run(worker, "status", token=None, **cache)).exit_code == 1
            with published_token(tmp_path / "baton" / "control", address, port, TOKEN):
                assert (await run(worker, "status", token=None, **cache)).exit_code == 0
            assert (await run(worker, "status", token=None, **cache)).exit_code == 1

    run_bounded(main())


def test_help_lists_every_command_with_its_fields() -> None:
    text = CliRunner().invoke(ctl, ["--help"]).stdout
    commands = {line.split()[0] for line in text.splitlines() if line.split()}
    assert {entry.path for entry in COMMAND_PATHS} <= commands
    assert "--group --host --port --rank --size --timeout-s" in text
    assert max(map(len, text.splitlines())) <= 110
