"""Compiles the native step for the CPU at hand, once, into the user's cache. Knows nothing of models.

Libraries are named by a hash of everything that shapes them, so a new compiler, CPU or version of Baton builds anew.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from ctypes import POINTER, c_float, c_int, c_int32, c_void_p
from pathlib import Path

log = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 60.0
SOURCES = ("step.cpp", "attention.hpp", "kernels.hpp", "pool.hpp")
# Without -ffast-math: NaN and infinity must reach the logits.
FLAGS = (
    *("-std=c++17", "-O3", "-w", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"),
    *("-fvisibility=hidden", "-fPIC", "-shared", "-pthread"),
)
TARGETS = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}
CPU_FIELDS = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "CPU variant", "Features")


class BuildError(Exception):
    """Why there is no library."""


class Shape(ctypes.Structure):
    """The shape of a model, field by field as step.cpp has it."""

    _fields_ = [
        ("layers", c_int32),
        ("hidden", c_int32),
        ("ffn", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab", c_int32),
        ("context", c_int32),
        ("blocks", c_int32),
        ("block_size", c_int32),
        ("is_bf16", c_int32),
        ("eps", c_float),
    ]


def load_decoder_library() -> ctypes.CDLL | None:
    """Return the compiled step, building it if need be; None, with a log line that says why, if it cannot be.

    CXX and CXXFLAGS are respected. May be called from several threads and processes at once. Blocks for seconds when it
    compiles.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    named, flags, search = (os.environ.get(name, "") for name in ("CXX", "CXXFLAGS", "PATH"))
    return _load(named, flags, search, Path(cache) / "baton" / "native")


def has_matrix_unit() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (AMX): torch uses that, the native step does not."""
    return sys.platform == "linux" and " amx_bf16" in _cpu()


@functools.cache
def _load(named: str, flags: str, search: str, cache: Path) -> ctypes.CDLL | None:
    try:
        if sys.platform != "linux" or platform.machine() not in TARGETS:
            raise BuildError(f"{sys.platform} on {platform.machine()} is not supported")
        command = [*_compiler(named, search), *FLAGS, TARGETS[platform.machine()], *shlex.split(flags)]
        return _declare(ctypes.CDLL(str(_built(command, cache))))
    except (BuildError, OSError, ValueError, subprocess.SubprocessError) as error:
        log.warning("no native step, torch does it instead: %s", error)
        return None


def _compiler(named: str, search: str) -> list[str]:
    for command in [shlex.split(named)] if named else [["g++"], ["c++"], ["clang++"]]:
        if found := shutil.which(command[0], path=search):
            return [found, *command[1:]]
    raise BuildError(f"no C++ compiler: {named or 'g++, c++ or clang++'} not found")


def _built(command: list[str], cache: Path) -> Path:
    """Return the path of the library, compiling it unless that was done before."""
    folder = Path(__file__).parent
    version = subprocess.run([*command, "--version"], capture_output=True, timeout=COMPILE_TIMEOUT_S, check=False)
    parts = [*(folder.joinpath(name).read_bytes() for name in SOURCES), version.stdout]
    parts += [" ".join(command).encode(), _cpu().encode()]
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]
    library = cache / f"{digest}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as scratch:
        fresh = Path(scratch) / library.name
        _compile([*command, str(folder / SOURCES[0]), "-o", str(fresh)], Path(scratch) / "messages")
        os.replace(fresh, library)
    log.info("compiled the native step into %s", library)
    return library


def _compile(command: list[str], messages: Path) -> None:
    # Messages go to a file: the compiler's own children would keep a pipe open after a deadline.
    with messages.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        try:
            status = process.wait(COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise BuildError(f"{command[0]} took longer than {COMPILE_TIMEOUT_S:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status:
        text = messages.read_text(errors="replace").strip()
        raise BuildError(f"{command[0]} failed with status {status}: {text.splitlines()[0] if text else 'no message'}")


def _cpu() -> str:
    """Return what tells this CPU's instructions from another's."""
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in CPU_FIELDS)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.baton_decoder_new.argtypes = [POINTER(Shape), c_int]
    library.baton_decoder_new.restype = c_void_p
    library.baton_decoder_bind.argtypes = [c_void_p] * 5
    library.baton_decoder_bind.restype = None
    library.baton_decoder_forward.argtypes = [c_void_p, c_int, c_void_p, c_int, c_void_p, c_void_p]
    library.baton_decoder_forward.restype = c_int
    library.baton_decoder_score.argtypes = [c_void_p, c_int, c_void_p, c_void_p]
    library.baton_decoder_score.restype = c_int
    library.baton_decoder_free.argtypes = [c_void_p]
    library.baton_decoder_free.restype = None
    return library
