"""Runs `baton serve` with and without an encode worker, and reads the metrics of its workers."""

import os
import re
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.disagg_client import HOST
from bench.systems import Launch, SystemFailed, free_port, process_trees, start, stop

MODEL_NAME = "model"
START_TIMEOUT_S = 120.0


class Layout(NamedTuple):
    """The workers of a system: those that compute prompts come first, encode workers after them."""

    workers: int
    encoders: int
    transport: str = "shm"

    @property
    def flags(self) -> tuple[str, ...]:
        counts = ("--workers", str(self.workers), *(("--encode", str(self.encoders)) if self.encoders else ()))
        return (*counts, "--kv-transports", self.transport)


class Readings(NamedTuple):
    """Totals of all workers of a system."""

    encode_s: float
    """From the admission of a request at an encode worker until its rows are offered to other workers."""
    transfer_s: float
    transfer_bytes: float
    misses: float
    """Items that were not in an embedding cache."""

    def since(self, earlier: "Readings") -> "Readings":
        return Readings(*(now - then for now, then in zip(self, earlier, strict=True)))


class Deployment:
    """One running `baton serve`."""

    def __init__(self, layout: Layout, port: int, root: psutil.Process) -> None:
        self.layout = layout
        self.port = port
        self._system_ports = [port + 1 + number for number in range(layout.workers + layout.encoders)]
        self._root = root

    def read(self) -> Readings:
        computing, encoding = (
            "\n".join(map(_metrics, ports))
            for ports in (self._system_ports[: self.layout.workers], self._system_ports[self.layout.workers :])
        )
        return Readings(
            encode_s=total(encoding, "baton_first_output_seconds_sum"),
            transfer_s=total(computing, "baton_transfer_seconds_sum"),
            transfer_bytes=total(computing, "baton_transfer_bytes_total"),
            misses=total(computing, "baton_media_cache_lookups_total", 'result="miss"'),
        )

    def pin_workers(self) -> None:
        """Give every worker one core, where there are enough: it has threads of its own for steps and for the tower."""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < len(self._system_ports):
            return
        for process in process_trees([self._root]):
            port = process.environ().get("BATON_SYSTEM_PORT", "")
            if "worker" in process.cmdline() and port.isdigit():
                _pin(process.pid, cores[int(port) - self._system_ports[0]])


def total(metrics: str, name: str, label: str = "") -> float:
    """The sum of the samples of `name` that have `label`."""
    samples = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", metrics, re.MULTILINE)
    return sum(float(value) for labels, value in samples if label in labels)


def _metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as response:
        return str(response.read().decode())


def _pin(pid: int, core: int) -> None:
    """New threads inherit the core of the thread that starts them."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {core})


@contextmanager
def serving(model: Path, layout: Layout) -> Iterator[Deployment]:
    """Run `baton serve` with one compute thread for each worker, for the duration of the block."""
    work_dir = Path(tempfile.mkdtemp(prefix="baton-bench-multimodal-"))
    port = free_port()
    fixed = ("--engine", "torch", "--model", str(model), "--name", MODEL_NAME, "--torch-threads", "1")
    places = ("--port", str(port), "--system-port", str(port + 1), "--log-dir", str(work_dir / "logs"))
    process = start(Launch(("baton", "serve", *fixed, *places, *layout.flags), {}), work_dir)
    try:
        _await_ready(process, work_dir / "log")
        yield Deployment(layout, port, process)
    finally:
        stop([process])
        shutil.rmtree(work_dir, ignore_errors=True)


def _await_ready(process: psutil.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while "Serving" not in log.read_text(errors="replace"):
        if time.monotonic() > deadline or process.poll() is not None:
            raise SystemFailed(f"baton serve did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


def measured_order(names: Sequence[str], repeat: int) -> list[str]:
    """The systems in the order of one repeat: each is the first one in turn."""
    first = repeat % len(names)
    return [*names[first:], *names[:first]]
