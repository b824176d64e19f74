"""The processes that `bench.router` measures: one worker, and routers that lead to it."""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

import baton
from baton.ports.runtime import Client
from bench.router_report import DIRECT, POOLS, THEIRS
from bench.systems import LOOPBACK_RUNTIME, Launch, start

MODEL_DIR = Path(baton.__file__).parent / "engines" / "echo" / "model"
LONGEST = 1000
PREFIX = "bench"


class System:
    """A way to the worker: a client that takes it, and the router on it if there is one."""

    def __init__(self, name: str, client: Client, router: psutil.Process | None) -> None:
        self.name = name
        self.client = client
        self.router = router

    def cpu_s(self) -> float:
        return cpu_s(self.router) if self.router is not None else 0.0

    def resident_bytes(self) -> int:
        return int(self.router.memory_info().rss) if self.router is not None else 0


def cpu_s(process: psutil.Process) -> float:
    """Processor time of a process and its threads, by the clock that Linux keeps of it: finer than /proc's ticks."""
    return time.clock_gettime(~process.pid << 3 | 2)


class Site:
    """The processes of one repeat."""

    def __init__(self, work_dir: Path, profile_dir: Path | None = None) -> None:
        self._work_dir = work_dir
        self._profile_dir = profile_dir
        self.discovery = str(work_dir / "discovery")
        self.processes: list[psutil.Popen] = []

    def start(self, names: Sequence[str]) -> dict[str, psutil.Popen]:
        """Start the worker, and the routers that `names` ask for."""
        path = self._pool_path(0)
        self._start(("bench.peers.stamping_worker", "--directory", self.discovery, "--path", path))
        return {name: self._start_router(name) for name in names if name != DIRECT}

    def path(self, name: str) -> str:
        """Return the endpoint that leads through router `name`, or directly to the worker."""
        return self._pool_path(0) if name == DIRECT else f"{PREFIX}-{name}.router.generate"

    def cpu_s(self) -> float:
        return time.process_time() + sum(cpu_s(process) for process in self.processes)

    def problem(self) -> str:
        """Return the end of what the processes have written."""
        return (self._work_dir / "log").read_text(errors="replace")[-2000:]

    def _pool_path(self, number: int) -> str:
        return f"{PREFIX}-pool{number}.backend.generate"

    def _start_router(self, name: str) -> psutil.Popen:
        if name == THEIRS:
            pools = [word for number in range(POOLS[name]) for word in ("--pool", self._pool_path(number))]
            argv = ("bench.peers.reference_router", "--path", self.path(name), "--longest", str(LONGEST), *pools)
            return self._start(argv)
        file = self._work_dir / f"{PREFIX}-{name}.json"
        file.write_bytes(msgspec.json.encode(topology(POOLS[name])))
        words = ("--topology", str(file), "--namespace", f"{PREFIX}-{name}", "--model", str(MODEL_DIR))
        return self._start(("baton", "router", "run", *words, "--system-port", "0", "--log-level", "warning"))

    def _start(self, argv: Sequence[str]) -> psutil.Popen:
        env = LOOPBACK_RUNTIME | {
            "DYN_FILE_KV": self.discovery,
            "BATON_RUNTIME_DIRECTORY": self.discovery,
            "BATON_PROFILE_DIR": str(self._profile_dir or ""),
        }
        process = start(Launch(argv, env), self._work_dir)
        self.processes.append(process)
        return process


def topology(pools: int) -> dict[str, object]:
    """Return a plan by the length of prompts. Only the first pool has a worker; short prompts go to it."""
    names = [f"pool{number}" for number in range(pools)]
    part = {
        "pools": [{"name": name, "namespace": f"{PREFIX}-{name}", "endpoint": "backend.generate"} for name in names],
        "axes": [{"name": "length", "min": 0, "max": LONGEST, "buckets": pools}],
        "mapping": names,
    }
    return {"mode": "aggregated", "retry": {"faster": True, "others": True}, "aggregated": part}
