"""Prefill and decode workers of one `baton serve`: others join and leave while it serves, unlike ones are refused."""

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.doubles.tiny_models import make_tiny_model
from tests.e2e.harness import BATON, LOAD_S, Process, Serve, environment, eventually, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PREFILL, DECODE = 0, 1
NAMES = ("tiny", "other")
PROMPT = "The quick brown fox jumps over the lazy dog, again and again."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def serve(start_shared: Callable[..., Serve], model: Path) -> Iterator[Serve]:
    flags = ("--model", str(model), "--name", ",".join(NAMES), "--torch-blocks", "128")
    serve = start_shared(Serve, *flags, engine="torch", prefill=1, decode=1)
    yield serve
    serve.stop()


def ask(serve: Serve, prompt: str = PROMPT, name: str = NAMES[0]) -> str:
    answer = serve.client().completions.create(model=name, prompt=prompt, max_tokens=8, temperature=0)
    assert answer.model == name
    return answer.choices[0].text


def joining(serve: Serve) -> list[str]:
    """Return the flags of the command that `baton serve` prints for those who want to join."""
    [command] = re.findall(r"^  baton worker (.*)$", serve.process.output.read_text(), re.MULTILINE)
    return ["worker", *command.split(), "--torch-blocks", "128"]


def test_the_ready_line_says_what_runs(serve: Serve) -> None:
    assert "with 1 prefill and 1 decode workers" in serve.process.output.read_text()
    assert serve.health(PREFILL) == serve.health(DECODE) == 200


def test_a_request_goes_through_both(serve: Serve) -> None:
    before = serve.metric("baton_rooms_ended_total", PREFILL, outcome="done")
    moved = serve.metric("baton_transfer_bytes_total", DECODE)
    assert ask(serve) == ask(serve)
    eventually(
        lambda: serve.metric("baton_rooms_ended_total", PREFILL, outcome="done") == before + 2,
        what="two rooms were used",
    )
    assert serve.metric("baton_transfer_bytes_total", DECODE) > moved
    assert serve.ended("completed", PREFILL, role="prefill") == serve.ended("completed", DECODE, role="decode")
    assert serve.metric("baton_rooms_open", PREFILL) == 0
    serve.assert_quiet()


def test_workers_of_both_roles_serve_and_pause_under_every_name(serve: Serve) -> None:
    assert len({ask(serve, name=name) for name in NAMES}) == 1

    def statuses() -> list[int]:
        body = {"prompt": PROMPT, "max_tokens": 1}
        return [serve.post("/v1/completions", {"model": name, **body})[0] for name in NAMES]

    control(f"{serve.port}/decode-0", "pause")
    eventually(lambda: 200 not in statuses(), what="it is paused under every name")
    control(f"{serve.port}/decode-0", "continue")
    eventually(lambda: statuses() == [200] * len(NAMES), what="it serves again under every name")


def control(worker: str, command: str) -> None:
    """Send a command to a worker by its name."""
    done = subprocess.run(
        [BATON, "ctl", worker, command], capture_output=True, text=True, env=environment(), timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_decode_worker_joins_and_leaves(serve: Serve, tmp_path: Path) -> None:
    worker = Process(joining(serve), tmp_path / "joined.log")
    try:
        eventually(lambda: serve.instances() == 3, LOAD_S, "the new worker is known")
        first = serve.ended("completed", DECODE, role="decode")
        for number in range(6):
            ask(serve, f"{number} {PROMPT}")
        assert serve.ended("completed", DECODE, role="decode") == first + 3, "they take turns"
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        eventually(lambda: serve.instances() == 2, what="it is gone")
        assert ask(serve)
    finally:
        worker.kill()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--torch-block-size", "32"),
            "blocks have 32 tokens, those of the prefill workers 16: give both the same --torch-block-size",
        ),
        (("--torch-dtype", "float32"), "give both the same --torch-dtype"),
    ],
)
@pytest.mark.slow
def test_a_worker_whose_kv_is_not_alike_does_not_start(serve: Serve, flags: tuple[str, ...], words: str) -> None:
    command = [*Process.command(joining(serve)), *flags]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LOAD_S, check=False)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert serve.instances() == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prefill", "1"), "add --decode"),
        (("--prefill", "1", "--decode", "1", "--workers", "2"), "drop it, or --prefill and --decode"),
        (("--prefill", "1", "--decode", "1", "--model-input", "text"), "drop --model-input text"),
        (("--role", "decode"), "give --prefill and --decode instead"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(flags: tuple[str, ...], words: str) -> None:
    command = Process.command(["serve", "--engine", "torch", "--port", str(free_ports(1)), *flags])
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, words in ended.stderr) == (2, True), ended.stderr
