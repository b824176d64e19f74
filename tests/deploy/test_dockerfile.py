"""The Dockerfile: hadolint finds nothing, its extras exist, and its commands work in an empty directory.

No image is built: that needs a registry.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.rendering import DEPLOY, ROOT, run, tool

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(400)]

DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def stages() -> dict[str, list[str]]:
    """Return the instructions of each stage, with continued lines joined."""
    found: dict[str, list[str]] = {}
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.M).replace("\\\n", " ")
    for line in filter(None, (line.strip() for line in text.splitlines())):
        if match := re.fullmatch(r"FROM \S+ AS (\w+)", line):
            found[match[1]] = []
        else:
            found[list(found)[-1]].append(line)
    return found


def runs(stage: str, tmp_path: Path) -> list[str]:
    """Return the shell commands of a stage, in a directory of this machine and without the packages of Debian."""
    places = {"/source": tmp_path / "source", "/wheel": tmp_path / "wheel", "/tmp/wheel": tmp_path / "wheel"}
    places |= {"/opt/baton": tmp_path / "baton", "/tmp/constraints.txt": ROOT / "constraints.txt"}
    commands = [
        line.removeprefix("RUN ") for line in stages()[stage] if line.startswith("RUN ") and "apt-get" not in line
    ]
    pattern = "|".join(re.escape(place) for place in sorted(places, key=len, reverse=True))
    return [re.sub(rf"(?<![\w/])(?:{pattern})(?!\w)", lambda m: str(places[m[0]]), each) for each in commands]


def test_hadolint_finds_nothing() -> None:
    run(tool("hadolint"), str(DOCKERFILE))


def test_there_is_a_stage_for_cpus_and_one_for_gpus() -> None:
    assert set(stages()) == {"wheel", "cpu", "cuda"}
    for stage in ("cpu", "cuda"):
        assert "USER 10001:10001" in stages()[stage]
        assert 'ENTRYPOINT ["baton"]' in stages()[stage]


def test_extras_exist() -> None:
    named = re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE.read_text())
    assert len(named) == 4
    assert {extra for each in named for extra in each.split(",")} <= set(EXTRAS)


def test_what_is_copied_is_in_the_context() -> None:
    """The context is what the ignore file leaves."""
    kept = [line[1:] for line in (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().split() if line[0] == "!"]
    assert all((ROOT / name).exists() for name in kept)
    lines = [line for lines in stages().values() for line in lines if line.startswith("COPY ") and "--from" not in line]
    assert {name for line in lines for name in line.split()[1:-1]} <= set(kept)


@pytest.mark.slow
def test_the_commands_make_an_environment_that_runs(tmp_path: Path) -> None:
    """As far as possible without an image: the wheel is built and installed, without extras, and `baton` runs."""
    (tmp_path / "source").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "src"):
        (tmp_path / "source" / name).symlink_to(ROOT / name)
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    variables.pop("VIRTUAL_ENV", None)
    (build,) = runs("wheel", tmp_path)
    (install,) = runs("cpu", tmp_path)
    assert "[$EXTRAS]" in install
    install = install.replace("[$EXTRAS]", "").replace('--extra-index-url "$TORCH_INDEX"', "").replace("--no-cache", "")
    for command in (build, install):
        done = subprocess.run(["sh", "-ec", command], env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert "Usage: baton" in run(str(tmp_path / "baton" / "bin" / "baton"), "--help")
