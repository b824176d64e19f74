"""GPU and driver, CPU and compiler, and which fast paths they allow; memory and shared memory."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from baton.config.settings import Settings
from baton.doctor.findings import Finding, note, ok, problem, warning
from baton.engine_kit.cpp_build import BuildError, cpu_features, find_compiler

COMMAND_TIMEOUT_S = 10.0
LITTLE_SHARED_MEMORY = 256 << 20
LITTLE_MEMORY = 1 << 30
GIB = 1 << 30
# The best first: a feature of the CPU, and what the compiled step does with it.
FAST_PATHS = (
    ("amx_bf16", "AMX: torch multiplies prompts in bfloat16 in hardware, the compiled step decodes"),
    ("avx512_bf16", "AVX-512 with bfloat16: the compiled step multiplies bfloat16 in hardware"),
    ("avx512f", "AVX-512: the compiled step, with bfloat16 converted"),
    ("avx2", "AVX2: the compiled step, with bfloat16 converted"),
    ("asimd", "NEON: the compiled step, as the compiler vectorizes it"),
)


def check_gpu(settings: Settings) -> Iterator[Finding]:
    """Check for a GPU, its driver, and a torch that can use it."""
    gpus = _gpus()
    wanted = settings.torch.device.startswith("cuda") or settings.engine in ("sglang", "trtllm")
    if not gpus:
        text = "no NVIDIA GPU is found: nvidia-smi lists none"
        mend = (
            "install the driver (apt install nvidia-driver), or pass the GPU to the container (docker run --gpus all)"
        )
        yield problem("gpu", text, mend) if wanted else note("gpu", f"{text}; the CPU computes")
        return
    yield from (ok("gpu", gpu) for gpu in gpus)
    if (cuda := _torch_cuda()) is not None and not cuda:
        mend = "pip install torch --index-url https://download.pytorch.org/whl/cu128"
        level = problem if wanted else warning
        yield level("gpu", "this torch is built for the CPU and does not use the GPU", mend)
    elif cuda:
        yield ok("gpu", f"torch is built for CUDA {cuda}")


def check_cpu(_: Settings) -> Iterator[Finding]:
    """Check the instruction set, and that more than one core may be used."""
    allowed, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    yield ok("cpu", f"{allowed} of {present} cores may be used")
    features = set(cpu_features().split())
    best = next((text for feature, text in FAST_PATHS if feature in features), None)
    if best is None:
        text = "no AVX2: the built-in engine is slow on this CPU"
        yield warning("cpu", text, "use a newer CPU, or expose its features to the virtual machine (-cpu host)")
    else:
        yield ok("cpu", best)


def check_compiler(settings: Settings) -> Iterator[Finding]:
    """Check that there is a C++ compiler, which the built-in engine and KV copies use."""
    try:
        command = find_compiler()
    except BuildError as error:
        text = f"{error}; torch computes instead, several times slower"
        yield warning("compiler", text, "apt install g++ (or dnf install gcc-c++), pip install ziglang, or set CXX")
        return
    yield ok("compiler", _first_line([*command, "--version"]) or " ".join(command))
    if settings.engine == "torch" and not settings.torch.native:
        yield note("compiler", "--no-torch-native is set: it is not used")


def check_memory(_: Settings) -> Iterator[Finding]:
    """Check free memory and the size of shared memory."""
    free = _available_memory()
    if free is not None and free < LITTLE_MEMORY:
        yield warning("memory", f"{free / GIB:.1f} GiB are free", "stop other programs, or serve a smaller model")
    elif free is not None:
        yield ok("memory", f"{free / GIB:.1f} GiB are free")
    try:
        shared = os.statvfs("/dev/shm")
    except OSError as error:
        yield problem("shared memory", f"/dev/shm: {error.strerror}", "mount -t tmpfs -o size=1G tmpfs /dev/shm")
        return
    size = shared.f_frsize * shared.f_blocks
    if size < LITTLE_SHARED_MEMORY:
        text = f"/dev/shm has {size >> 20} MiB: engines with several processes and UCX need more"
        yield warning("shared memory", text, "mount -o remount,size=1G /dev/shm, or docker run --shm-size=1g")
    else:
        yield ok("shared memory", f"/dev/shm has {size / GIB:.1f} GiB")


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    lines = _output(query).splitlines()
    return [f"{name}, {memory}, driver {driver}" for name, memory, driver in (_three(line) for line in lines) if driver]


def _three(line: str) -> tuple[str, str, str]:
    name, _, rest = line.partition(",")
    memory, _, driver = rest.partition(",")
    return name.strip(), memory.strip(), driver.strip()


def _torch_cuda() -> str | None:
    """Return the CUDA version that torch is built for, "" for none; None without torch. Does not import it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^cuda[^=]*=\s*(?:'([^']*)'|None)", text, re.MULTILINE)
    return (match[1] or "") if match is not None else None


def _available_memory() -> int | None:
    try:
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return int(match[1]) << 10 if match is not None else None


def _first_line(command: list[str]) -> str:
    return next(iter(_output(command).splitlines()), "")


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
