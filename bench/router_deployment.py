"""The processes that `bench.router` measures: one worker, and the routers in front of it."""

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
MAX_PROMPT_TOKENS = 1000
PREFIX = "bench"


class System:
    """A route to the worker: the client of its endpoint, and the router process if there is one."""

    def __init__(self, name: str, client: Client, router: psutil.Process | None) -> None:
        self.name = name
        self.client = client
        self.router = router

    def cpu_s(self) -> float:
        return cpu_s(self.router) if self.router is not None else 0.0

    def resident_bytes(self) -> int:
        return int(self.router.memory_info().rss) if self.router is not None else 0


def cpu_s(process: psutil.Process) -> float:
    """CPU time of a process and its threads, by its Linux CPU clock: finer than the ticks in /proc."""
    return time.clock_gettime(~process.pid << 3 | 2)


class Deployment:
    """The processes of one repeat."""

    def __init__(self, work_dir: Path, profile_dir: Path | None = None) -> None:
        self._work_dir = work_dir
        self._profile_dir = profile_dir
        self.discovery = str(work_dir / "discovery")
        self.processes: list[psutil.Popen] = []

    def start(self, names: Sequence[str]) -> dict[str, psutil.Popen]:
        """Start the worker and the routers in `names`."""
        path = self._pool_path(0)
        self._start(("bench.peers.stamping_worker", "--directory", self.discovery, "--path", path))
        return {name: self._start_router(name) for name in names if name != DIRECT}

    def path(self, name: str) -> str:
        """Return the endpoint of router `name`, or that of the worker for DIRECT."""
        return self._pool_path(0) if name == DIRECT else f"{PREFIX}-{name}.router.generate"

    def cpu_s(self) -> float:
        return time.process_time() + sum(cpu_s(process) for process in self.processes)

    def log_tail(self) -> str:
        """Return the end of the processes' shared log."""
        return (self._work_dir / "log").read_text(errors="replace")[-2000:]

    def _pool_path(self, number: int) -> str:
        return f"{PREFIX}-pool{number}.backend.generate"

    def _start_router(self, name: str) -> psutil.Popen:
        if name == THEIRS:
            pools = [argument for number in range(POOLS[name]) for argument in ("--pool", self._pool_path(number))]
            argv = (
                "bench.peers.reference_router",
                "--path",
                self.path(name),
                "--max-prompt-tokens",
                str(MAX_PROMPT_TOKENS),
                *pools,
            )
            return self._start(argv)
        file = self._work_dir / f"{PREFIX}-{name}.json"
        file.write_bytes(msgspec.json.encode(topology(POOLS[name])))
        arguments = ("--topology", str(file), "--namespace", f"{PREFIX}-{name}", "--model", str(MODEL_DIR))
        return self._start(("baton", "router", "run", *arguments, "--system-port", "0", "--log-level", "warning"))

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
    """Return a plan with buckets by prompt length. Only the first pool, that of short prompts, has a worker."""
    names = [f"pool{number}" for number in range(pools)]
    role_plan = {
        "pools": [{"name": name, "namespace": f"{PREFIX}-{name}", "endpoint": "backend.generate"} for name in names],
        "axes": [{"name": "length", "min": 0, "max": MAX_PROMPT_TOKENS, "buckets": pools}],
        "mapping": names,
    }
    return {"mode": "aggregated", "retry": {"faster": True, "others": True}, "aggregated": role_plan}
