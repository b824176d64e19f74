"""Prefill and decode workers that come and go while clients ask, and those that do not fit and say so."""

import contextlib
import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("torch")

from tests.e2e.disagg_load import (
    EXACT,
    Apart,
    Load,
    Question,
    ask,
    assert_nothing_held,
    letters,
    make_letters_model,
    make_questions,
    reference,
)
from tests.e2e.harness import LOAD_S, Process, Serve, environment, eventually, fetch, free_ports

__all__ = ["letters"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

CLIENTS = 8
PREFILL, DECODE = 0, 1


@pytest.fixture(scope="module")
def texts(start_shared: Callable[..., Serve], letters: Path) -> dict[Question, str]:
    """What one worker that does everything answers."""
    whole = start_shared(Serve, "--model", str(letters), *EXACT, engine="torch")
    texts = reference(whole, make_questions(12, prompt=(100, 1000), tokens=(50, 300)))
    whole.stop()
    return texts


@pytest.fixture(scope="module")
def serve(start_shared: Callable[..., Serve], letters: Path) -> Iterator[Serve]:
    serve = start_shared(Serve, "--model", str(letters), *EXACT, engine="torch", prefill=1, decode=1)
    yield serve
    serve.stop()


def joining(serve: Serve) -> list[str]:
    """Return the command that `baton serve` prints for those who want to join, with the flags that it was given."""
    [command] = eventually(
        lambda: re.findall(r"^  baton worker (.*)\n", serve.process.output.read_text(), re.MULTILINE),
        what="the command to join is printed",
    )
    return ["worker", *command.split(), *EXACT]


class Joined:
    """One more worker of a running `baton serve`."""

    def __init__(self, serve: Serve, role: str, output: Path, *flags: str) -> None:
        port = free_ports(1)
        self.role = role
        self._url = f"http://127.0.0.1:{port}"
        eventually(lambda: serve.instances() == 2, 30, "nobody else has joined")
        self.process = Process([*joining(serve), "--role", role, "--system-port", str(port), *flags], output)
        try:
            eventually(lambda: fetch(f"{self._url}/health")[0] == 200, LOAD_S, "the new worker is ready")
            eventually(lambda: serve.instances() == 3, 30, "the new worker is known")
        except BaseException:
            self.process.kill()
            raise

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric of it."""
        families = text_string_to_metric_families(fetch(f"{self._url}/metrics")[1])
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def completed(self) -> float:
        """Return how many requests it has done."""
        return self.metric("baton_requests_total", role=self.role, state="completed")


@contextlib.contextmanager
def joined(serve: Serve, role: str, output: Path, *flags: str) -> Iterator[Joined]:
    """Have one more worker; it leaves well, and is forgotten."""
    worker = Joined(serve, role, output, *flags)
    try:
        yield worker
        worker.process.signal(signal.SIGTERM)
        assert worker.process.wait() == 0
        eventually(lambda: serve.instances() == 2, 30, "it is forgotten")
    finally:
        worker.process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_worker_joins_and_leaves_under_load_and_nobody_notices(
    serve: Serve, texts: dict[Question, str], role: str, tmp_path: Path
) -> None:
    mine = {"prefill": PREFILL, "decode": DECODE}[role]
    with Load(serve, texts, CLIENTS) as load:
        with joined(serve, role, tmp_path / "joined.log") as worker:
            load.flow()
            before = serve.ended("completed", mine, role)
            eventually(lambda: worker.completed() >= 5, 30, "the new worker serves")
            eventually(lambda: serve.ended("completed", mine, role) > before, 30, "the old one goes on")
            if role == "prefill":
                assert worker.metric("baton_rooms_ended_total", outcome="done") >= 5
            else:
                assert worker.metric("baton_transfer_bytes_total") > 0
        load.flow()
    assert load.bad() == []
    assert_nothing_held(serve, prefill=1)


@pytest.mark.slow
def test_ways_that_do_not_meet_are_named(start: Callable[..., Apart], letters: Path) -> None:
    def times_named() -> int:
        return apart.log_of("worker-1").count("no transport reads the other worker's memory (it offers tcp)")

    def is_named(stream: bool) -> bool:
        """Whether a request reaches the decode worker. A frontend that has just found its workers answers 503 too."""
        before = times_named()
        answer = ask(apart, Question("Which way?", 8), stream)
        assert answer.is_error(503), answer
        assert answer.text == ""
        return times_named() > before

    own = [("--role", "prefill", "--kv-transports", "tcp"), ("--role", "decode", "--kv-transports", "shm")]
    apart = start(Apart, "--model", str(letters), *EXACT, own=own)
    for stream in (False, True):
        eventually(lambda stream=stream: is_named(stream), what="the decode worker names the transports")
    assert_nothing_held(apart, prefill=1)
    apart.stop()


@pytest.mark.parametrize(
    ("role", "flags", "words"),
    [
        (
            "decode",
            ("--torch-block-size", "32"),
            "this worker's KV blocks have 32 tokens, those of the prefill workers 16: give both the same"
            " --torch-block-size",
        ),
        (
            "prefill",
            ("--torch-block-size", "8"),
            "this worker's KV blocks have 8 tokens, those of the decode workers 16: give both the same"
            " --torch-block-size",
        ),
        ("decode", ("--torch-dtype", "bfloat16"), "give both the same --torch-dtype"),
    ],
)
def test_a_worker_with_other_blocks_is_refused(serve: Serve, role: str, flags: tuple[str, ...], words: str) -> None:
    assert_refused([*joining(serve), "--role", role, *flags], words)
    assert serve.instances() == 2


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_another_model_of_the_same_name_is_refused(serve: Serve, role: str, tmp_path: Path) -> None:
    other = make_letters_model(tmp_path / "tiny", seed=4)
    assert_refused([*joining(serve), "--role", role, "--model", str(other)], "give both the same --model")
    assert serve.instances() == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prefill", "1"), "add --decode"),
        (("--decode", "1"), "add --prefill"),
        (("--prefill", "1", "--decode", "1", "--workers", "2"), "drop it, or --prefill and --decode"),
        (("--prefill", "1", "--decode", "1", "--model-input", "text"), "drop --model-input text"),
        (("--prefill", "1", "--decode", "1", "--role", "decode"), "drop --role decode"),
        (("--prefill", "1", "--decode", "1", "--kv-transports", "pigeon"), "--kv-transports"),
    ],
)
def test_settings_that_cannot_be_a_whole_are_refused(letters: Path, flags: tuple[str, ...], words: str) -> None:
    assert_refused(["serve", "--port", str(free_ports(1)), "--model", str(letters), "--log-dir", "-", *flags], words)


def test_a_model_for_embeddings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    flags = ("--model", str(tmp_path), "--prefill", "1", "--decode", "1", "--log-dir", "-")
    assert_refused(["serve", "--port", str(free_ports(1)), *flags], "embed")


def assert_refused(arguments: list[str], words: str) -> None:
    """The command ends with code 2 and says why."""
    command = Process.command(arguments)
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LOAD_S, check=False)
    assert (ended.returncode, words in ended.stderr) == (2, True), (ended.returncode, ended.stderr[-2000:])
