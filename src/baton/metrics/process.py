"""What every process shows of itself: its version, its place in the deployment, its restarts, and what it uses."""

import importlib.metadata
import platform

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

from baton import __version__
from baton.config.environment import process_name, restarts
from baton.metrics.families import Counted, Family, Label

ALL = ("aggregated", "prefill", "decode", "encode", "embed", "process", "router", "frontend")

BUILD = Family(
    name="baton_build_info",
    kind="gauge",
    unit="always 1",
    meaning="Versions of Baton, of the Dynamo runtime and of Python",
    processes=ALL,
    labels=(
        Label("version", source="the version of Baton"),
        Label("runtime", source="the version of ai-dynamo-runtime"),
        Label("python", source="the version of Python"),
    ),
)
PROCESS = Family(
    name="baton_process_info",
    kind="gauge",
    unit="always 1",
    meaning="What this process is. Join it by `instance` to select other metrics by role or model",
    processes=ALL,
    labels=(
        Label("name", source="the name that `baton serve` gives: `prefill-0`, `frontend`; else the role"),
        Label("role", (*ALL,)),
        Label("model", source="the first name of the served model"),
        Label("engine", ("echo", "torch", "sglang", "trtllm", "none")),
    ),
)
RESTARTS = Family(
    name="baton_process_restarts_total",
    kind="counter",
    unit="restarts",
    meaning="How often `baton serve` has started this process again. 0 without `baton serve`",
    processes=ALL,
)
FAMILIES = (BUILD, PROCESS, RESTARTS)

OF_THE_LIBRARY = {
    "process_cpu_seconds_total": ("counter", "seconds", "CPU time of the process, user and system"),
    "process_resident_memory_bytes": ("gauge", "bytes", "Resident memory of the process"),
    "process_virtual_memory_bytes": ("gauge", "bytes", "Virtual memory of the process"),
    "process_start_time_seconds": ("gauge", "seconds", "Start of the process, in seconds since 1970"),
    "process_open_fds": ("gauge", "files", "Open file descriptors"),
    "process_max_fds": ("gauge", "files", "Limit of open file descriptors"),
}
"""The families of `ProcessCollector`: name, type, unit, meaning."""


def process_registry(role: str, model: str = "", engine: str = "none") -> CollectorRegistry:
    """Return a new registry with what every process shows."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Counted(BUILD, registry).labels(__version__, _runtime_version(), platform.python_version()).set(1)
    name = (process_name() or role).rpartition("/")[2]
    Counted(PROCESS, registry).labels(name, role, model, engine).set(1)
    Counted(RESTARTS, registry).set(restarts())
    return registry


def _runtime_version() -> str:
    try:
        return importlib.metadata.version("ai-dynamo-runtime")
    except importlib.metadata.PackageNotFoundError:
        return ""
