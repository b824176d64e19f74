"""Python, packages and engines. Imports none of them: torch alone takes seconds."""

import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Iterator

from baton.config.settings import Settings
from baton.doctor.findings import Finding, note, ok, problem, warning
from baton.engines.registry import ENGINES

PACKAGE = "baton-serve"
OLDEST_PYTHON = (3, 11)
EXTRAS = {"echo": ""}
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def check_python(_: Settings) -> Iterator[Finding]:
    """Check the version of Python, and that it is Linux."""
    version = f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})"
    if sys.version_info < OLDEST_PYTHON:
        yield problem("python", version, "install Python 3.11 or later, and Baton in an environment of it")
    else:
        yield ok("python", version)
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() != "Linux":
        yield problem("system", system, "run Baton on Linux, or in a Linux container")
    else:
        yield ok("system", system)


def check_packages(_: Settings) -> Iterator[Finding]:
    """Check that the packages that Baton needs are there, in the versions that it asks for."""
    try:
        requirements = [each for each in importlib.metadata.requires(PACKAGE) or () if "extra ==" not in each]
    except importlib.metadata.PackageNotFoundError:
        yield warning("packages", f"{PACKAGE} is not installed as a package", f"pip install {PACKAGE}")
        return
    found = []
    for requirement in requirements:
        match = _NAME.match(requirement)
        name = match[0] if match is not None else requirement
        installed = _version(name)
        if installed is None:
            yield problem("packages", f"{name} is not installed", f"pip install '{requirement}'")
        elif not _satisfies(installed, requirement):
            text = f"{name} {installed} is installed, and Baton needs {requirement}"
            yield problem("packages", text, f"pip install '{requirement}'")
        else:
            found.append(f"{name} {installed}")
    yield ok("packages", f"{PACKAGE} {importlib.metadata.version(PACKAGE)} with {', '.join(found)}")


def check_engines(settings: Settings) -> Iterator[Finding]:
    """Check which engines are installed; the one in the settings must be."""
    for name, kind in ENGINES.items():
        missing = [module for module in kind.needs if importlib.util.find_spec(module) is None]
        if not missing:
            versions = ", ".join(f"{module} {_version(module) or 'of an unknown version'}" for module in kind.needs)
            yield ok("engines", f"{name}: {versions or 'part of Baton'}")
        elif name == settings.engine:
            mend = f"pip install '{PACKAGE}[{name}]', or choose another with --engine"
            yield problem("engines", f"{name}: {' and '.join(missing)} not installed", mend)
        else:
            yield note("engines", f"{name}: not installed (pip install '{PACKAGE}[{name}]')")
    if settings.engine not in ENGINES:
        yield problem("engines", f"there is no engine {settings.engine!r}", f"--engine {' or '.join(ENGINES)}")


def _version(name: str) -> str | None:
    for candidate in (name, name.replace("_", "-")):
        try:
            return importlib.metadata.version(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _satisfies(version: str, requirement: str) -> bool:
    """Whether an installed version is one of `requirement`; True where nothing can compare them."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return True
    return Requirement(requirement).specifier.contains(version, prereleases=True)
