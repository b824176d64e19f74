"""`baton ctl` against a real system server: what it sends, what it prints, and how it exits."""

import asyncio
import json

import pytest
from click.testing import CliRunner, Result

from baton.cli.ctl import ctl
from baton.control.http.command_table import ROUTES
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
from tests.unit.control.operated import DONE, House, living

UPDATE = '{"source": {"type": "disk", "path": "/m"}, "version": "v2"}'


async def run(*words: str, **variables: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, ctl, words, env=variables)


def sent(house: House) -> Command:
    return house.engine.verbs[-1]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("memory/release", "--tags", "kv_cache,weights"), ReleaseMemory(tags=("kv_cache", "weights"))),
        (("memory/release", "--tags=weights"), ReleaseMemory(tags=("weights",))),
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
def test_words_become_the_verb(words: tuple[str, ...], command: Command) -> None:
    async def main() -> None:
        async with living(*[DONE] * 2) as house:
            result = await run(str(house.server.port), *words)
            assert result.exit_code == 0, result.output
            assert sent(house) == command

    run_bounded(main())


def test_replies_are_readable_and_can_be_had_raw() -> None:
    async def main() -> None:
        async with living(Outcome(message="loaded", adapters=("a", "b")), DONE) as house:
            port = str(house.server.port)
            result = await run(port, "lora/list")
            assert result.stdout.splitlines() == ["loaded", "adapters: a, b"]
            status = (await run(port, "status")).stdout
            assert "weight_version: initial" in status
            assert "released: none" in status
            assert "registered: yes" in status
            assert "  pause_modes: abort, keep, retract" in status
            assert json.loads((await run(port, "status", "--json")).stdout)["paused"] is False
            assert (await run(port, "weights/version")).stdout.startswith("the weights are called initial")

    run_bounded(main())


@pytest.mark.parametrize(
    "form", ["{port}", ":{port}", "127.0.0.1:{port}", "http://127.0.0.1:{port}", "http://localhost:{port}/"]
)
def test_a_worker_goes_by_port_address_or_url(form: str) -> None:
    async def main() -> None:
        async with living() as house:
            assert (await run(form.format(port=house.server.port), "status")).exit_code == 0

    run_bounded(main())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("dance",), "no verb 'dance'"),
        (("pause", "--mood", "keep"), "no field '--mood'; it has mode, timeout_s"),
        (("pause", "--mode"), "--mode needs a value"),
        (("pause", "--mode", "softly"), "softly"),
        (("pause", "{not json"), "JSON"),
        (("pause", '{"mood": 1}'), "mood"),
        (("memory/release",), "tags"),
        (("profile/start", "--directory", "/p", "--steps", "many"), "steps"),
        (("weights/update", "--source", "disk", "--version", "1"), "no JSON"),
        (("status", "--mode", "keep"), "no fields"),
        (("continue", "now"), "JSON"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_sent(words: tuple[str, ...], complaint: str) -> None:
    result = CliRunner().invoke(ctl, ["1", *words])
    assert result.exit_code == 2
    assert complaint in " ".join(result.stderr.split())


def test_a_worker_that_is_none_is_refused() -> None:
    assert CliRunner().invoke(ctl, ["somewhere", "status"]).exit_code == 2
    result = CliRunner().invoke(ctl, ["1", "status"])
    assert result.exit_code == 1
    assert "cannot reach http://127.0.0.1:1" in result.stderr


def test_a_refusal_is_told_in_the_workers_words() -> None:
    async def main() -> None:
        async with living() as house:
            result = await run(str(house.server.port), "memory/release", "--tags", "cuda_graph")
            assert (result.exit_code, result.stdout) == (1, "")
            assert result.stderr.startswith("baton: unsupported: tags: 'cuda_graph'")

    run_bounded(main())


def test_the_token_comes_from_flag_or_environment() -> None:
    async def main() -> None:
        async with living(control_token="s3cret") as house:
            port = str(house.server.port)
            result = await run(port, "status")
            assert (result.exit_code, "unauthorized" in result.stderr) == (1, True)
            assert (await run(port, "status", "--token", "s3cret")).exit_code == 0
            assert (await run(port, "status", BATON_CONTROL_TOKEN="s3cret")).exit_code == 0

    run_bounded(main())


def test_help_lists_every_verb_with_its_fields() -> None:
    text = CliRunner().invoke(ctl, ["--help"]).stdout
    first_words = {line.split()[0] for line in text.splitlines() if line.split()}
    assert {route.path for route in ROUTES} <= first_words
    assert "--group --host --port --rank --size --timeout-s" in text
    assert max(map(len, text.splitlines())) <= 110
