"""A newcomer follows docs/start.md: clone, two commands, answers, a picture, a killed worker, and Ctrl-C.

The clone has an environment and a home directory of its own, with nothing in them. The time of each step is printed.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.docs.pages import ROOT, Command, commands
from tests.docs.session import Session, matches
from tests.e2e.harness import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3000)]

PAGE = "docs/start.md"
INSTALL_S = 1800.0
ANSWER_S = 240.0
SHARED_MEMORY = Path("/dev/shm")


class Newcomer:
    """One person with a terminal for the server and one for everything else, and a clock."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.times: list[tuple[str, float]] = []

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Note how long a step takes."""
        started = time.monotonic()
        yield
        self.times.append((name, time.monotonic() - started))

    def follow(self, command: Command) -> None:
        """Do what the page says, and see what it shows."""
        first = command.text.split("\n")[0][:60]
        with self.step(first):
            output = self.session.run(command)
            if "make serve" in command.text:
                self.session.settle(INSTALL_S)
                self.session.expect(self.session.servers[-1], command.shown)
            elif command.shown:
                shown = self.session.translate("\n".join(command.shown))
                assert matches(output, shown), f"{PAGE}:{command.line} shows {shown}; it is {output}"

    def open_the_view(self) -> None:
        """Open the web view at the address that the server has printed."""
        with self.step("the web view"):
            address = re.search(r"View\s+(http://127\.0\.0\.1:\d+\S*)", self.session.servers[-1].output())
            assert address is not None, self.session.servers[-1].output()
            with urllib.request.urlopen(address[1], timeout=60) as answer:
                assert b"<html" in answer.read().lower()

    def kill_the_worker_of(self, stream: Command, listing: Command, kill: Command) -> None:
        """Start a long answer, and kill the worker that writes it."""
        with self.step("an answer whose worker is killed"), self._in_background(stream) as answer:
            busy = eventually(self._busy_worker, ANSWER_S, "a worker with a request")
            eventually(lambda: self._written(answer) > 2, ANSWER_S, "the first words")
            assert str(busy) in self.session.run(listing)
            self.session.replace("PID", str(busy))
            self.session.run(kill)
            assert answer.wait(ANSWER_S) == 0
        events = self._output(answer).split("\n\n")
        assert "data: [DONE]" in events
        assert not [event for event in events if '"error"' in event]
        with self.step("the supervisor has started a new worker"):
            eventually(lambda: len(self.workers()) == 2, ANSWER_S, "two workers again")
        assert busy not in self.workers()

    @contextmanager
    def _in_background(self, command: Command) -> Iterator["subprocess.Popen[bytes]"]:
        with (self.session.work / "stream.txt").open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", self.session.translate(command.text)],
                cwd=self.session.work,
                env=self.session.variables,
                stdout=file,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait(10)

    def _output(self, _process: object) -> str:
        return (self.session.work / "stream.txt").read_text()

    def _written(self, process: object) -> int:
        return self._output(process).count("data:")

    def workers(self) -> dict[int, str]:
        """Return the system servers of the workers that run, by process id."""
        entries = (self.session.home / ".cache" / "baton" / "processes").glob("*.json")
        read = [json.loads(path.read_text()) for path in entries]
        return {
            entry["pid"]: entry["url"]
            for entry in read
            if "/worker-" in entry["name"] and psutil.pid_exists(entry["pid"])
        }

    def _busy_worker(self) -> int | None:
        for pid, url in self.workers().items():
            answer = subprocess.run(
                ["curl", "-s", f"{url}/health"], capture_output=True, text=True, timeout=30, check=False
            )
            if json.loads(answer.stdout or "{}").get("in_flight"):
                return pid
        return None


@pytest.fixture
def session(directory: Path) -> Iterator[Session]:
    """Return a session with nothing but what a machine has; skip where no package index can be reached."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no repository that can be cloned")
    started = Session(directory, {"REPOSITORY": str(ROOT)})
    _forget_this_environment(started)
    python, download = started.variables["PYTHON"], directory / "download"
    probe = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(download), "msgspec"]
    if subprocess.run(probe, env=started.variables, capture_output=True, timeout=300, check=False).returncode != 0:
        pytest.skip("no package index can be reached")
    try:
        yield started
    finally:
        started.kill()


def _forget_this_environment(session: Session) -> None:
    """Remove the environment of the tests from that of the newcomer, except for where packages come from."""
    variables = session.variables
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"):
        variables.pop(name, None)
    variables["PATH"] = os.environ["PATH"].replace(f"{Path(sys.executable).parent}:", "")
    variables["PYTHON"] = str(Path(sys.base_prefix) / "bin" / "python3")
    settings = Path.home() / ".config" / "pip" / "pip.conf"
    if settings.exists():
        variables.setdefault("PIP_CONFIG_FILE", str(settings))


def orphaned_shared_memory(since: float) -> list[str]:
    """Return files of shared memory that were made since then and that no process uses."""
    used = set()
    for process in psutil.process_iter():
        try:
            used |= {mapped.path for mapped in process.memory_maps()} | {each.path for each in process.open_files()}
        except psutil.Error:
            continue
    made = [
        path for path in SHARED_MEMORY.iterdir() if path.stat().st_ctime >= since and path.stat().st_uid == os.getuid()
    ]
    return [str(path) for path in made if str(path) not in used]


def test_a_newcomer_sees_answers_and_a_killed_worker_and_nothing_stays(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    since = time.time()
    newcomer = Newcomer(session)
    *steps, stream, listing, kill = commands(PAGE)
    assert (listing.text.split()[0], kill.text) == ("pgrep", "kill -9 PID")
    for command in steps:
        newcomer.follow(command)
        if "baton top" in command.text:
            newcomer.open_the_view()
    newcomer.kill_the_worker_of(stream, listing, kill)
    with newcomer.step("Ctrl-C"):
        session.close()
    eventually(lambda: not session.leftovers(), 15, f"nothing is left: {session.leftovers()}")
    assert orphaned_shared_memory(since) == []
    with capsys.disabled():
        print("\n" + "\n".join(f"{seconds:8.1f} s  {name}" for name, seconds in newcomer.times))


def test_ctrl_c_before_the_first_answer_leaves_nothing(directory: Path) -> None:
    session = Session(directory)
    session.use_models()
    try:
        server = session.start(Command(PAGE, 0, "baton serve --engine echo --prefill 1 --decode 1"))
        eventually(lambda: len(server.tree()) > 2, 60, "processes have been started")
        os.killpg(server.process.pid, signal.SIGINT)
        server.process.wait(120)
        eventually(lambda: not session.leftovers(), 15, f"nothing is left: {session.leftovers()}")
    finally:
        session.kill()


def test_a_worker_that_was_killed_leaves_nothing(directory: Path) -> None:
    session = Session(directory)
    try:
        server = session.start(Command(PAGE, 0, "baton serve --engine echo --workers 2"))
        eventually(lambda: "Serving echo" in server.output(), ANSWER_S, "it serves")
        newcomer = Newcomer(session)
        killed, *_ = before = newcomer.workers()
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: len(newcomer.workers().keys() - before.keys()) == 1, ANSWER_S, "a new worker")
        session.close()
        assert session.leftovers() == []
    finally:
        session.kill()
