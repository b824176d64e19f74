"""Instructions that a frontend and a worker execute for a request, counted by valgrind.

CPU time differs by several percent from one start of the same program to the next, instructions by a few percent less:
idle threads that wake up, and caches that depend on addresses. So that what is compared is counted in one start. One of
the two processes runs under callgrind at a time.
"""

import http.client
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.chat import HOST, chat_body
from bench.systems import SystemFailed, check_response, free_port, inherited_environment

PROCESSES = ("frontend", "worker")
START_TIMEOUT_S = 240.0
REQUEST_TIMEOUT_S = 120.0
WARM_REQUESTS = 30


@contextmanager
def counted_process(process: str, variables: Mapping[str, str], tokens: int) -> Iterator[Callable[[int], float]]:
    """Return a block with a function that sends a number of requests for `tokens` tokens, and returns how many
    instructions `process` executes for each of them.

    `variables` are settings of both processes. Raises SystemFailed.
    """
    if shutil.which("valgrind") is None:
        raise SystemFailed("install valgrind: apt-get install valgrind")
    directory = Path(tempfile.mkdtemp(prefix="bench-instructions-"))
    try:
        with _running(process, variables, directory) as (counted, port):
            connection = _connect(port, tokens, directory)
            _ask(connection, tokens, WARM_REQUESTS)

            def count(requests: int) -> float:
                _command(counted, "zero")
                _ask(connection, tokens, requests)
                _command(counted, "dump")
                return _take_total(directory) / requests

            count(1)  # the first count has much of what came before it
            yield count
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _running(process: str, variables: Mapping[str, str], directory: Path) -> Iterator[tuple[psutil.Popen, int]]:
    port = free_port()
    own = {"BATON_RUNTIME_DIRECTORY": str(directory / "discovery"), "PYTHONHASHSEED": "0"}
    flags = {"frontend": ("--port", str(port)), "worker": ("--engine", "echo", "--system-port", "0")}
    started: dict[str, psutil.Popen] = {}
    try:
        for name in PROCESSES:
            command = [sys.executable, "-m", "baton", name, *flags[name]]
            if name == process:
                command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={directory / 'counts'}", *command]
            with (directory / f"{name}.log").open("ab") as log:
                started[name] = psutil.Popen(
                    command,
                    env={**inherited_environment(), **own, **variables},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        yield started[process], port
    finally:
        for each in started.values():  # nothing of them is kept, and under valgrind they would take long to stop
            each.kill()
            each.wait(REQUEST_TIMEOUT_S)


def _connect(port: int, tokens: int, directory: Path) -> http.client.HTTPConnection:
    """Return a connection on which a request was answered."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        connection = http.client.HTTPConnection(HOST, port, timeout=REQUEST_TIMEOUT_S)
        try:
            _ask(connection, tokens, 1)
            return connection
        except (OSError, http.client.HTTPException, SystemFailed) as error:
            connection.close()
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text(errors="replace")[-1000:] for path in directory.glob("*.log"))
                raise SystemFailed(f"no answer: {error}\n{logs}") from error
            time.sleep(0.5)


def _ask(connection: http.client.HTTPConnection, tokens: int, requests: int) -> None:
    for _ in range(requests):
        connection.request("POST", "/v1/chat/completions", chat_body(tokens), {"content-type": "application/json"})
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise SystemFailed(f"status {response.status}: {body[:200]!r}")
        check_response(body, tokens)


def _command(process: psutil.Popen, command: str) -> None:
    """Let callgrind do `command`, and wait for it."""
    subprocess.run(["vgdb", f"--pid={process.pid}", command], check=True, capture_output=True, timeout=60)


def _take_total(directory: Path) -> int:
    """Return the total of the counts that callgrind has written, and remove them."""
    [counts] = directory.glob("counts.*")
    found = re.search(r"^totals: (\d+)", counts.read_text(errors="replace"), re.MULTILINE)
    counts.unlink()
    if found is None:
        raise SystemFailed(f"{counts} has no total")
    return int(found[1])
