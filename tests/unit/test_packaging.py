"""The wheel asks for ranges, and `constraints.txt` has a version in each range that development installs."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALLED = ("torch", "nixl", "bench", "docs", "view-tests", "dev")
REQUIREMENTS = {
    "the package": PROJECT["dependencies"],
    **{extra: PROJECT["optional-dependencies"][extra] for extra in INSTALLED},
}


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): Version(version) for name, version in pairs}


@pytest.mark.parametrize("requirements", REQUIREMENTS.values(), ids=REQUIREMENTS)
def test_every_requirement_is_a_range_with_a_tested_version_in_it(requirements: list[str]) -> None:
    tested = pins()
    for requirement in map(Requirement, requirements):
        assert not any(part.operator in ("==", "===") for part in requirement.specifier), requirement
        if requirement.name == "triton":
            continue  # torch for CUDA requires a version of its own, so a pin would make it impossible to install
        version = tested[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"
