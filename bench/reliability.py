"""Serves thousands of requests while workers are killed and frozen, connections are cut and etcd restarts.

Every text is compared with what an undisturbed worker says. Afterwards nothing may be left: no request without an end,
no KV block, room, segment or process. `make reliability` writes `bench/results/reliability.md`.
"""

import argparse
import asyncio
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil

from bench.reliability_client import Clients
from bench.reliability_report import Run, to_markdown
from bench.result_files import describe_machine, git_commit
from tests.e2e.disagg_load import EXACT, Question, cut_connections, make_letters_model, make_questions, reference
from tests.e2e.harness import Serve, System, eventually, free_ports
from tests.e2e.pooled import Pooled

RESULTS = Path("bench/results")
AT_ONCE = 16
KILL_EVERY_S = 20.0
MENDED_S = 60.0
FREEZE_AT_S, CUT_AT_S, ETCD_AT_S = 10.0, 15.0, 8.0
ETCD_DOWN_S = 3.0
SETTLE_S = 60.0
QUESTIONS = 200
TIMEOUTS = (
    *("--kv-heartbeat-s", "0.25", "--kv-peer-timeout-s", "3", "--kv-claim-timeout-s", "6"),
    *("--stall-timeout-s", "6", "--request-timeout-s", "120", "--torch-threads", "1"),
)
SEGMENT = re.compile(r"memfd:|/dev/shm/")


class Deployment:
    """A layout that runs: its system, its workers' numbers among the system ports, and what else can fail."""

    def __init__(self, system: Serve, workers: range, etcd: "Etcd | None" = None) -> None:
        self.system = system
        self.workers = workers
        self.etcd = etcd

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the deployment."""
        return self.system.children()


class Etcd:
    """An etcd on loopback that can be restarted with its data."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._client = free_ports(2)
        self.url = f"http://127.0.0.1:{self._client}"
        self._process = self._start()

    def restart(self) -> None:
        """Take it away for some seconds."""
        self.stop()
        time.sleep(ETCD_DOWN_S)
        self._process = self._start()

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(30)

    def _start(self) -> "subprocess.Popen[bytes]":
        peer = f"http://127.0.0.1:{self._client + 1}"
        arguments = {
            "data-dir": str(self._directory / "etcd"),
            "log-level": "warn",
            "listen-client-urls": self.url,
            "advertise-client-urls": self.url,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
        }
        with (self._directory / "etcd.log").open("ab") as log:
            flags = [f"--{name}={value}" for name, value in arguments.items()]
            return subprocess.Popen(["etcd", *flags], stdout=log, stderr=log)


@contextmanager
def aggregated(directory: Path, flags: tuple[str, ...]) -> Iterator[Deployment]:
    """Two aggregated workers."""
    with _running(Serve(directory, *flags, engine="torch", workers=2)) as system:
        yield Deployment(system, range(2))


@contextmanager
def on_etcd(directory: Path, flags: tuple[str, ...]) -> Iterator[Deployment]:
    """Two aggregated workers that find each other by etcd."""
    etcd = Etcd(directory)
    try:
        settings = {
            "BATON_RUNTIME_DISCOVERY": "etcd",
            "BATON_RUNTIME_ETCD": etcd.url,
            "BATON_RUNTIME_BIND": "127.0.0.1",
        }
        with _running(Serve(directory, *flags, engine="torch", workers=2, settings=settings)) as system:
            yield Deployment(system, range(2), etcd)
    finally:
        etcd.stop()


@contextmanager
def disaggregated(directory: Path, flags: tuple[str, ...], transport: str) -> Iterator[Deployment]:
    """Two prefill and two decode workers."""
    system = Serve(directory, *flags, "--kv-transports", transport, engine="torch", prefill=2, decode=2)
    with _running(system):
        yield Deployment(system, range(4))


@contextmanager
def pooled(directory: Path, flags: tuple[str, ...]) -> Iterator[Deployment]:
    """A global router over two pools of one worker each."""
    topology = {
        "mode": "aggregated",
        "retry": {"faster": True, "others": True},
        "aggregated": {
            "pools": [{"name": "short", "workers": {"count": 1}}, {"name": "long", "workers": {"count": 1}}],
            "axes": [{"name": "length", "min": 0, "max": 900, "buckets": 2}],
            "mapping": ["short", "long"],
        },
    }
    system = Pooled(directory, topology, 2, ("--engine", "torch", *flags))
    with _running(system):
        yield Deployment(system, range(1, 3))


LAYOUTS: dict[str, Callable[[Path, tuple[str, ...]], AbstractContextManager[Deployment]]] = {
    "aggregated": aggregated,
    "aggregated, etcd": on_etcd,
    "disaggregated, shm": lambda directory, flags: disaggregated(directory, flags, "shm"),
    "disaggregated, tcp": lambda directory, flags: disaggregated(directory, flags, "tcp"),
    "disaggregated, nixl": lambda directory, flags: disaggregated(directory, flags, "nixl"),
    "pools": pooled,
}


@contextmanager
def _running(system: System) -> Iterator[Serve]:
    assert isinstance(system, Serve)
    try:
        system.wait_ready()
        yield system
    finally:
        system.close()


async def inject(deployment: Deployment, faults: dict[str, int], seed: int) -> None:
    """Break one thing after the other, until cancelled; count in `faults` what was done.

    What was broken before has been mended by then, unless that takes longer than `MENDED_S`.
    """
    chance = random.Random(seed)
    began = time.monotonic()
    schedule = [
        (FREEZE_AT_S, "frozen", lambda: _signal(deployment, chance, signal.SIGSTOP)),
        (CUT_AT_S, "connections cut", lambda: _cut(deployment, chance)),
    ]
    if deployment.etcd is not None:
        schedule.append((ETCD_AT_S, "etcd restarts", deployment.etcd.restart))
    schedule += [
        (KILL_EVERY_S * number, "killed", lambda: _signal(deployment, chance, signal.SIGKILL))
        for number in range(1, 1000)
    ]
    for at_s, name, act in sorted(schedule, key=lambda entry: entry[0]):
        await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
        await asyncio.to_thread(_wait_until_mended, deployment)
        await asyncio.to_thread(act)
        faults[name] = faults.get(name, 0) + 1


def _wait_until_mended(deployment: Deployment) -> None:
    end = time.monotonic() + MENDED_S
    while not _healthy(deployment) and time.monotonic() < end:
        time.sleep(0.5)


def _healthy(deployment: Deployment) -> bool:
    try:
        return all(deployment.system.health(worker) == 200 for worker in deployment.workers)
    except OSError:
        return False


def _signal(deployment: Deployment, chance: random.Random, number: signal.Signals) -> None:
    deployment.system.worker(chance.choice(deployment.workers)).send_signal(number)


def _cut(deployment: Deployment, chance: random.Random) -> None:
    """Cut every TCP connection of a worker, as a network that fails does."""
    worker = deployment.system.worker(chance.choice(deployment.workers))
    for port in {connection.laddr.port for connection in worker.net_connections("tcp")}:
        cut_connections(worker.pid, port)


def segments(processes: list[psutil.Process]) -> int:
    """Count the shared-memory segments that processes map."""
    return sum(len(SEGMENT.findall(Path(f"/proc/{process.pid}/maps").read_text())) for process in processes)


def memory_mib(processes: list[psutil.Process]) -> float:
    """Return the private memory of processes."""
    found = (re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{p.pid}/status").read_text()) for p in processes)
    return sum(int(match[1]) for match in found if match is not None) / 1024


def left_behind(deployment: Deployment) -> dict[str, float]:
    """Return what workers still hold once nothing is requested: it must be 0."""
    system = deployment.system
    end = time.monotonic() + SETTLE_S
    while True:
        held = {
            "blocks": sum(system.metric("baton_engine_kv_blocks", worker, use="used") for worker in deployment.workers),
            "rooms": sum(system.metric("baton_rooms_open", worker) for worker in deployment.workers),
            "requests": sum(system.metric("baton_requests_in_flight", worker) for worker in deployment.workers),
        }
        if not any(held.values()) or time.monotonic() > end:
            return held
        time.sleep(0.5)


def run_layout(name: str, texts: Mapping[Question, str], flags: tuple[str, ...], total: int, seed: int) -> Run:
    """Run one layout; return what was counted."""
    directory = Path(tempfile.mkdtemp(prefix="baton-reliability-"))
    with LAYOUTS[name](directory, flags) as deployment:
        clients = Clients(deployment.system.port, texts, total // 10, AT_ONCE, seed)
        asyncio.run(clients.run())
        left_behind(deployment)
        before = (len(deployment.processes()), segments(deployment.processes()), memory_mib(deployment.processes()))
        files = sum(process.num_fds() for process in deployment.processes())
        clients = Clients(deployment.system.port, texts, total, AT_ONCE, seed + 1)
        faults: dict[str, int] = {}
        began = time.monotonic()
        asyncio.run(_disturbed(clients, deployment, faults, seed))
        seconds = time.monotonic() - began
        _all_healthy(deployment)
        held = left_behind(deployment)
        processes = deployment.processes()
        run = Run(
            layout=name,
            date=datetime.now(UTC).date().isoformat(),
            commit=git_commit(),
            machine=machine_line(),
            requests=total,
            seconds=seconds,
            outcomes=dict(clients.tally.outcomes),
            wrong=clients.tally.wrong,
            hung=clients.tally.hung,
            longest_gap_s=clients.tally.longest_gap_s,
            faults=faults,
            held=held,
            processes=(before[0], len(processes)),
            segments=(before[1], segments(processes)),
            descriptors=(files, sum(process.num_fds() for process in processes)),
            memory_mib=(before[2], memory_mib(processes)),
        )
        deployment.system.stop()
    shutil.rmtree(directory, ignore_errors=True)
    return run


async def _disturbed(clients: Clients, deployment: Deployment, faults: dict[str, int], seed: int) -> None:
    injecting = asyncio.create_task(inject(deployment, faults, seed))
    try:
        await clients.run()
    finally:
        injecting.cancel()
        await asyncio.wait([injecting])


def _all_healthy(deployment: Deployment) -> None:
    eventually(lambda: _healthy(deployment), 120, "every worker is healthy")


def machine_line() -> str:
    """Return the machine in a few words."""
    machine = describe_machine()
    return f"{machine.cores} cores of {machine.cpu}"


def write(runs: Mapping[str, Run], out: Path) -> None:
    """Write `runs`, and those of other layouts that are in the file already."""
    data = out.with_suffix(".json")
    earlier = msgspec.json.decode(data.read_bytes(), type=list[Run]) if data.exists() else []
    by_layout = {run.layout: run for run in earlier} | dict(runs)
    rows = [by_layout[name] for name in LAYOUTS if name in by_layout]
    out.write_text(to_markdown(rows))
    data.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))


def main() -> None:
    """Run the layouts, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="for each layout")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "reliability.md")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit by exception, so that child processes are stopped
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    directory = Path(tempfile.mkdtemp(prefix="baton-reliability-model-"))
    model = make_letters_model(directory / "tiny")
    flags = ("--model", str(model), *EXACT, *TIMEOUTS)
    questions = make_questions(QUESTIONS, prompt=(20, 900), tokens=(4, 160))
    with aggregated(directory, flags) as deployment:
        texts = reference(deployment.system, questions)
        deployment.system.stop()
    runs = {}
    for name in args.layouts:
        runs[name] = run_layout(name, texts, flags, args.requests, args.seed)
        print(runs[name].line(), flush=True)
        write(runs, args.out)
    shutil.rmtree(directory, ignore_errors=True)
    raise SystemExit(0 if all(run.is_clean for run in runs.values()) else 1)


if __name__ == "__main__":
    main()
