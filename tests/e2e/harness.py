"""Baton as the tests see it: real processes with ports, discovery and logs of their own, and real clients."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

BATON = str(Path(sys.executable).with_name("baton"))
START_S = 30.0
LOAD_S = 240.0  # for a worker that loads a model on a busy machine
STOP_S = 60.0
LOG_TAIL_CHARS = 3000
FIXED_PORTS = range(10_000, 32_768)  # below those that the kernel gives to clients

T = TypeVar("T")

# What runs now; the report of a failed test shows the end of its logs.
running: list["System"] = []


def eventually(look: Callable[[], T], within_s: float = 60.0, what: str = "") -> T:
    """Return the first true answer of `look`; fail when there is none in time. An exception counts as no answer."""
    end = time.monotonic() + within_s
    while True:
        try:
            seen: object = look()
            if seen:
                return seen
        except (OSError, psutil.Error, ValueError) as error:
            seen = error
        if time.monotonic() > end:
            raise AssertionError(f"not within {within_s:g} s: {what or look.__name__} (last: {seen!r})")
        time.sleep(0.02)


def free_ports(count: int) -> int:
    """Return the first of `count` free ports in a row. Parallel test processes choose from different ports."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    size = len(FIXED_PORTS) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = FIXED_PORTS[worker * size : (worker + 1) * size]
    for _ in range(1000):
        first = random.choice(ports[:-count])
        if all(_is_free(first + offset) for offset in range(count)):
            return first
    raise AssertionError(f"no {count} free ports in a row")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def environment(settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a `baton` process: nothing that another Baton or its runtime would read, but ours."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "DYN_"))}
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "ETCD_ENDPOINTS", "NATS_SERVER"):
        inherited.pop(name, None)
    return {**inherited, **(settings or {})}


def echoed(prompt: str, tokens: int) -> str:
    """Return what the echo engine says to an ASCII `prompt`: it goes round it until `tokens` are out."""
    return (prompt * (tokens // len(prompt) + 1))[:tokens]


def assert_unbroken(text: str, prompt: str, tokens: int) -> int:
    """Check that an echo that moved between workers misses and repeats nothing; return how often it moved.

    A worker that takes over gets the prompt with all that the client has, and echoes that from its beginning. With a
    `prompt` of characters that are all different, the place of every move can be seen, and so can a lost character.
    """
    assert len(set(prompt)) == len(prompt), "every character of the prompt must be different"
    source, at, moves = prompt, 0, 0
    for place, character in enumerate(text):
        if character != source[at]:
            source, at, moves = prompt + text[:place], 0, moves + 1
            assert character == source[at], (
                f"a gap or a repeat after {place} characters: {text[place - 40 : place + 40]!r}"
            )
        at = (at + 1) % len(source)
    assert len(text) == tokens, f"{len(text)} characters instead of {tokens}"
    return moves


def exposed(processes: Iterable[psutil.Process]) -> list[str]:
    """Return what these processes listen on that other hosts can reach."""
    return [
        f"{' '.join(process.cmdline()[1:4])}: {connection.laddr.ip}:{connection.laddr.port}"
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and not ip_address(connection.laddr.ip).is_loopback
    ]


class Process:
    """One `baton` command, with its output in a file."""

    def __init__(
        self, arguments: Iterable[str], output: Path, settings: Mapping[str, str] | None = None, program: str = BATON
    ) -> None:
        self.output = output
        self.arguments = tuple(arguments)
        with output.open("ab") as file:
            self.popen = subprocess.Popen(
                [program, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment(settings),
            )
        self.pid = self.popen.pid

    @staticmethod
    def command(arguments: Iterable[str]) -> list[str]:
        """Return the command line for `baton` with these arguments."""
        return [BATON, *arguments]

    def wait(self, within_s: float = STOP_S) -> int:
        """Wait until it has ended; return its exit code."""
        return self.popen.wait(within_s)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.popen.send_signal(number)

    def kill(self) -> None:
        """End it, whatever it does."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(10)


class System:
    """One OpenAI endpoint with its workers."""

    def __init__(self, directory: Path, workers: int, engine: str, namespace: str = "baton") -> None:
        self.directory = directory
        self.start_timeout_s = START_S if engine == "echo" else LOAD_S
        self.workers = workers
        self.namespace = namespace
        self.port = free_ports(workers + 1)
        self.system_ports = [self.port + 1 + number for number in range(workers)]
        self.address = "127.0.0.1"
        self.url = f"http://{self.address}:{self.port}"

    def logs(self) -> dict[str, str]:
        """Return the end of every log."""
        return {
            path.name: path.read_text(errors="replace")[-LOG_TAIL_CHARS:]
            for path in sorted(self.directory.rglob("*.log"))
        }

    def log_of(self, name: str) -> str:
        """Return the whole log of one process: "worker-0", "frontend"."""
        return next(self.directory.rglob(f"*{name}.log")).read_text(errors="replace")

    def client(self, strict: bool = True) -> openai.OpenAI:
        """Return the official client; a strict one refuses answers that are not as OpenAI documents them."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            timeout=60,
            max_retries=0,
            _strict_response_validation=strict,
        )

    def async_client(self) -> openai.AsyncOpenAI:
        """Return the official client for asyncio."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=100, max_retries=0)

    def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Post `body`, JSON if it is no str or bytes; return the status and the body of the answer."""
        data = (
            body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
        )
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json", **(headers or {})}
        )
        return _fetch(request)

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Return the status and the body of the answer to a GET."""
        return _fetch(urllib.request.Request(self.url + path, headers=dict(headers or {})))

    def open(self, path: str, body: Mapping[str, object], receive_buffer: int | None = None) -> socket.socket:
        """Post `body` and return the connection, with nothing read from it."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        return connection

    def system(
        self, path: str, worker: int = 0, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Get `path` from a worker's system port, or post `body` to it."""
        url = f"http://127.0.0.1:{self.system_ports[worker]}{path}"
        return _fetch(urllib.request.Request(url, data=body, headers=dict(headers or {})))

    def metric(self, name: str, worker: int = 0, **labels: str) -> float:
        """Return a metric of a worker, 0 if it has none of that name and those labels."""
        _, text = self.system("/metrics", worker)
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def ended(self, state: str, worker: int = 0, role: str = "aggregated") -> float:
        """Return how many requests of clients have ended in `state`."""
        return self.metric("baton_requests_total", worker, role=role, state=state)

    def load(self, worker: int = 0) -> dict[str, float]:
        """Return what a worker has in hand."""
        return {
            "in_flight": self.metric("baton_requests_in_flight", worker),
            "running": self.metric("baton_engine_running_requests", worker),
            "waiting": self.metric("baton_engine_waiting_requests", worker),
            "used_blocks": self.metric("baton_engine_kv_blocks", worker, use="used"),
        }

    def assert_quiet(self, within_s: float = 10.0) -> None:
        """Every worker gets rid of everything it had in hand."""
        for worker in range(self.workers):
            eventually(lambda w=worker: not any(self.load(w).values()), within_s, f"nothing left on worker {worker}")

    def is_ready(self) -> bool:
        """Whether the model is listed."""
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer:
            return bool(json.load(answer)["data"])

    def instances(self) -> int:
        """Return how many workers the frontend knows."""
        with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
            mine = {"namespace": self.namespace, "endpoint": "generate"}
            return sum(mine.items() <= instance.items() for instance in json.load(answer)["instances"])

    def health(self, worker: int = 0) -> int:
        """Return the status of a worker's /health."""
        return self.system("/health", worker)[0]

    def wait_ready(self) -> None:
        """Wait until it serves."""
        raise NotImplementedError

    def close(self) -> None:
        """End everything, whatever it does; for the way out of a failed test."""
        raise NotImplementedError


class Serve(System):
    """A `baton serve`. Its workers are counted in the order prefill, decode or others, encoders, processors."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        engine: str = "echo",
        workers: int = 1,
        prefill: int = 0,
        decode: int = 0,
        encoders: int = 0,
        processors: int = 0,
        settings: Mapping[str, str] | None = None,
        program: str = BATON,
    ) -> None:
        super().__init__(directory, (prefill + decode or workers) + encoders + processors, engine)
        self.registered = processors or self.workers  # no frontend finds workers behind process workers
        flags = ["--engine", engine]
        flags += ["--prefill", str(prefill), "--decode", str(decode)] if prefill else ["--workers", str(workers)]
        flags += ["--port", str(self.port), "--system-port", str(self.system_ports[0])]
        self.process = Process(
            ["serve", *flags, "--log-dir", str(directory), *arguments], directory / "serve.log", settings, program
        )
        running.append(self)

    def wait_ready(self) -> None:
        """See `System.wait_ready`."""
        eventually(self._announced, self.start_timeout_s, "the ready line")
        eventually(lambda: self.instances() == self.registered, START_S, "every worker is known")

    def _announced(self) -> bool:
        code = self.process.popen.poll()
        assert code is None, f"baton serve ended with {code}: {self.process.output.read_text()}"
        return f"on {self.url} " in self.process.output.read_text()

    def children(self) -> list[psutil.Process]:
        """Return the frontend and the workers."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def assert_unexposed(self) -> None:
        """No process listens on an address that other hosts can reach."""
        processes = [psutil.Process(self.process.pid), *self.children()]
        assert len(processes) > self.workers + 1
        assert exposed(processes) == []

    def worker(self, number: int = 0) -> psutil.Process:
        """Return the process of a worker, the way its system port tells them apart."""
        port = str(self.system_ports[number])
        return eventually(
            lambda: next(
                (
                    child
                    for child in self.children()
                    if child.environ().get("BATON_SYSTEM_PORT") == port and "worker" in child.cmdline()
                ),
                None,
            ),
            what=f"worker {number}",
        )

    def frontend(self) -> psutil.Process:
        """Return the process of the frontend."""
        return next(child for child in self.children() if "frontend" in child.cmdline())

    def stop(self) -> None:
        """Stop the way a person does; nothing may be left and nothing may have gone wrong."""
        children = self.children()
        self.process.signal(signal.SIGTERM)
        code = self.process.wait()
        assert code == 0, f"baton serve ended with {code}"
        left = [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        assert not left, f"left behind: {left}"

    def close(self) -> None:
        """See `System.close`."""
        children = self.children() if self.process.popen.poll() is None else []
        self.process.kill()
        for child in children:
            if child.is_running():
                child.kill()
        running.remove(self)


class Cluster(System):
    """A frontend and workers, each started by itself, that find each other by discovery."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        engine: str = "echo",
        workers: int = 1,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(directory, workers, engine, (settings or {}).get("BATON_NAMESPACE", "baton"))
        self._arguments = ("--engine", engine, *arguments)
        self._settings = {"BATON_RUNTIME_DIRECTORY": str(directory / "discovery"), **(settings or {})}
        self.frontend = Process(["frontend", "--port", str(self.port)], directory / "frontend.log", self._settings)
        self.processes = [self.start_worker(number) for number in range(workers)]
        running.append(self)

    def wait_ready(self) -> None:
        """See `System.wait_ready`."""
        for number in range(self.workers):
            eventually(lambda n=number: self.health(n) == 200, self.start_timeout_s, f"worker {number} is ready")
        eventually(self.is_ready, START_S, "the model is listed")
        eventually(lambda: self.instances() == self.workers, START_S, "every worker is known")

    def start_worker(self, number: int, *more: str) -> Process:
        """Start a worker, with `more` flags of its own."""
        return Process(
            ["worker", "--system-port", str(self.system_ports[number]), *self._arguments, *more],
            self.directory / f"worker-{number}.log",
            self._settings,
        )

    def stop(self) -> None:
        """Stop the way a person does: workers first; nothing may have gone wrong."""
        for process in (*self.processes, self.frontend):
            if process.popen.poll() is None:
                process.signal(signal.SIGTERM)
                code = process.wait()
                assert code == 0, f"{process.output.name} ended with {code}"

    def close(self) -> None:
        """See `System.close`."""
        for process in (*self.processes, self.frontend):
            process.kill()
        running.remove(self)


def generated_token(port: int) -> str | None:
    """Return the control token of a worker that was given none; None if there is no such worker."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    files = [cache / "baton" / "control" / f"{address}-{port}" for address in ("127.0.0.1", "0.0.0.0")]
    return next((file.read_text() for file in files if file.exists()), None)


def _fetch(request: urllib.request.Request) -> tuple[int, str]:
    """Send a request; a command that brings no token gets the generated one."""
    url = urllib.parse.urlsplit(request.full_url)
    if url.path.startswith("/control/") and not request.has_header("Authorization"):
        request.add_header("Authorization", f"Bearer {generated_token(url.port or 80)}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(errors="replace")


def fetch(url: str, body: bytes | None = None) -> tuple[int, str]:
    """Post `body` to `url`, or get it if there is none; return the status and the body of the answer."""
    return _fetch(urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"}))


def error_in(text: str) -> dict[str, Any]:
    """Return the error in the body of an answer or in the data of an event, which has the shape of OpenAI."""
    error: dict[str, Any] = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}, text
    assert error["message"], text
    return error


def events(text: str) -> Iterator[tuple[str, str]]:
    """Yield (event, data) of every server-sent event in `text`; the event is "message" where none is named."""
    for block in text.split("\n\n"):
        fields = [line.partition(":") for line in block.split("\n") if line and not line.startswith(":")]
        data = "\n".join(value.strip() for name, _, value in fields if name == "data")
        if fields:
            yield next((value.strip() for name, _, value in fields if name == "event"), "message"), data
