"""Starts and stops the processes of the systems under test and reads their CPU time and memory."""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.chat import HOST, chat_body
from bench.result_files import Usage

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 30.0
PROBE_TOKENS = 2
LOOPBACK_RUNTIME = {
    "DYN_TCP_RPC_HOST": HOST,
    "DYN_TCP_RESPONSE_STREAM_HOST": HOST,
    "DYN_EVENT_PLANE_HOST": HOST,
    "DYN_SYSTEM_HOST": HOST,
    "DYN_SELF_HOST_METADATA": "0",
    "DYN_LOG": "error,request_span=off",
    "HF_HUB_OFFLINE": "1",
}


class SystemFailed(Exception):
    """A system under test did not start or returned a wrong response."""


@dataclass(frozen=True)
class Setup:
    """The configuration of a system."""

    pace_ms: float
    model_dir: Path
    profile_dir: Path | None = None
    before: Path | None = None
    """A checkout of an older Baton, for `before`."""


@dataclass(frozen=True)
class Site:
    """The port and the working directory of one system."""

    port: int
    work_dir: Path


@dataclass(frozen=True)
class Launch:
    """One program to start: a module with its arguments, and its environment variables."""

    argv: Sequence[str]
    env: dict[str, str]


def baton_launches(setup: Setup, site: Site) -> list[Launch]:
    argv = ("baton", "serve", "--engine", "echo", "--port", str(site.port), "--system-port", "0")
    env = {
        "BATON_ECHO_PACE_MS": str(setup.pace_ms),
        "BATON_MAX_IN_FLIGHT": "4096",
        "BATON_RUNTIME_DIRECTORY": str(site.work_dir / "discovery"),
        "BATON_LOG_DIR": "-",
    }
    if setup.profile_dir:
        env["BATON_PROFILE_DIR"] = str(setup.profile_dir)
    return [Launch(argv, env)]


def eager_baton_launches(setup: Setup, site: Site) -> list[Launch]:
    """Baton with one event per token, like the peers: no merging by time or by burst."""
    eager = {"BATON_FLUSH_INTERVAL_MS": "0", "BATON_ECHO_BURST": "1"}
    return [Launch(launch.argv, launch.env | eager) for launch in baton_launches(setup, site)]


def older_baton_launches(setup: Setup, site: Site) -> list[Launch]:
    """`baton-eager` of an older checkout, in the environment of this one."""
    if setup.before is None:
        raise SystemFailed("before: no checkout is given")
    older = {"PYTHONPATH": str(setup.before / "src")}
    return [Launch(launch.argv, launch.env | older) for launch in eager_baton_launches(setup, site)]


def reference_launches(setup: Setup, site: Site, *options: str) -> list[Launch]:
    env = LOOPBACK_RUNTIME | {"DYN_FILE_KV": str(site.work_dir / "discovery")}
    worker = ("bench.peers.reference_worker", "--model-dir", str(setup.model_dir), *pacing(setup), *options)
    frontend = ("bench.peers.reference_frontend", "--port", str(site.port))
    return [Launch(frontend, env), Launch(worker, env)]


def stepping_launches(setup: Setup, site: Site) -> list[Launch]:
    return reference_launches(setup, site, "--steps")


def push_launches(setup: Setup, site: Site) -> list[Launch]:
    return reference_launches(setup, site, "--steps", "--push")


def fastapi_launches(setup: Setup, site: Site) -> list[Launch]:
    argv = ("bench.peers.fastapi_server", "--port", str(site.port), *pacing(setup))
    return [Launch(argv, {})]


def pacing(setup: Setup) -> list[str]:
    return ["--pace-ms", str(setup.pace_ms)]


BEFORE = "before"
LAUNCHES: dict[str, Callable[[Setup, Site], list[Launch]]] = {
    "baton": baton_launches,
    "reference": reference_launches,
    "reference-steps": stepping_launches,
    "push": push_launches,
    "fastapi": fastapi_launches,
    "baton-eager": eager_baton_launches,
    BEFORE: older_baton_launches,
}
# At a pace slower than Baton's flush interval the two are the same.
FLAT_OUT_ONLY = {"baton-eager"}
# Unpaced it is the reference.
PACED_ONLY = {"reference-steps"}
# A client that does not read blocks all streams of `push`; an older Baton is there for its costs.
NEVER_STALLED = {"push", BEFORE}


def role_of(argv: Sequence[str]) -> str:
    """The role of a process in its system, from its command line."""
    names = {name.rpartition(".")[2] for name in argv}
    if any(name.endswith("worker") for name in names):
        return "worker"
    if names & {"frontend", "bare_frontend", "reference_frontend", "fastapi_server"}:
        return "frontend"
    return "other"


class RunningSystem:
    """A system that is ready. The roles of its processes are determined on construction."""

    def __init__(self, name: str, setup: Setup, port: int, roots: Sequence[psutil.Process]) -> None:
        self.name = name
        self.pace_ms = setup.pace_ms
        self.port = port
        self._roles = {process: role_of(process.cmdline()) for process in process_trees(roots)}
        self.at_start = self.usage()

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of its processes."""
        return tuple(process.pid for process in self._roles)

    def usage(self) -> Usage:
        cpu_s: dict[str, float] = defaultdict(float)
        rss_bytes: dict[str, int] = defaultdict(int)
        for process, role in self._roles.items():
            try:
                times, memory = process.cpu_times(), process.memory_info()
            except psutil.NoSuchProcess as error:
                raise SystemFailed(f"{self.name}: its {role} process has ended") from error
            cpu_s[role] += times.user + times.system
            rss_bytes[role] += memory.rss
        return Usage(dict(cpu_s), dict(rss_bytes))


def process_trees(roots: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [process for root in roots for process in (root, *root.children(recursive=True))]


@contextmanager
def running(
    name: str, setup: Setup, systems: Mapping[str, Callable[[Setup, Site], list[Launch]]] = LAUNCHES
) -> Iterator[RunningSystem]:
    """Start a system on a free port, yield it after its first correct response, and stop it."""
    site = Site(free_port(), Path(tempfile.mkdtemp(prefix=f"baton-bench-{name}-")))
    roots: list[psutil.Popen] = []
    try:
        for launch in systems[name](setup, site):
            roots.append(start(launch, site.work_dir))
        wait_until_ready(name, site, roots)
        yield RunningSystem(name, setup, site.port, roots)
    finally:
        stop(roots)
        shutil.rmtree(site.work_dir, ignore_errors=True)


def start(launch: Launch, work_dir: Path) -> psutil.Popen:
    """Start one program in its own session, with its output in the log of the working directory."""
    with (work_dir / "log").open("ab") as log:
        return psutil.Popen(
            [sys.executable, "-m", *launch.argv],
            env=inherited_environment() | {"TMPDIR": str(work_dir)} | launch.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def inherited_environment() -> dict[str, str]:
    """The variables that systems get from this process: none that configures them, or the runtime's stack traces."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "BATON_", "RUST_"))}


def stop(roots: Sequence[psutil.Process]) -> None:
    """Terminate the started programs, then kill what remains of their process trees."""
    processes = process_trees([root for root in roots if root.is_running()])
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            root.terminate()
    _, alive = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=STOP_TIMEOUT_S)


def wait_until_ready(name: str, site: Site, roots: Sequence[psutil.Popen]) -> None:
    """Return once the system has streamed a whole response. Raises SystemFailed with its log."""
    deadline = time.monotonic() + START_TIMEOUT_S
    reason = "no response"
    while time.monotonic() < deadline and all(root.poll() is None for root in roots):
        try:
            check_response(request_chat(site.port, PROBE_TOKENS), PROBE_TOKENS)
            return
        except (OSError, http.client.HTTPException, SystemFailed) as error:
            reason = str(error)
        time.sleep(0.1)
    log = (site.work_dir / "log").read_text(errors="replace")
    raise SystemFailed(f"{name} did not start: {reason}\n{log[-2000:]}")


def request_chat(port: int, tokens: int) -> bytes:
    """The body of one streamed chat completion."""
    connection = http.client.HTTPConnection(HOST, port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("POST", "/v1/chat/completions", chat_body(tokens), {"content-type": "application/json"})
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise SystemFailed(f"status {response.status}: {body[:200]!r}")
        return body
    finally:
        connection.close()


def check_response(body: bytes, tokens: int) -> None:
    """Check that text and reported usage have one character per token. Raises SystemFailed."""
    text, reported = "", 0
    for line in body.splitlines():
        if line.startswith(b"data: {"):
            chunk = json.loads(line.removeprefix(b"data: "))
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            reported = (chunk.get("usage") or {}).get("completion_tokens", reported)
    if (len(text), reported) != (tokens, tokens):
        raise SystemFailed(f"requested {tokens} tokens, received {len(text)} characters, {reported} reported")


def free_port() -> int:
    """A free port below the ephemeral range."""
    for port in range(18000, 19000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise SystemFailed("no free port between 18000 and 18999")
