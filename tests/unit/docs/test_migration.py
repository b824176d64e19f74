"""The page for users of Dynamo: no flag of theirs is missing, and every flag of ours that it names exists."""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from baton.config.load import options
from baton.control.http.command_table import COMMAND_PATHS
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "migrating-from-dynamo.md").read_text()
THEIRS: dict[str, list[str]] = json.loads((ROOT / "tests" / "docs" / "dynamo_flags.json").read_text())
LIBRARY = json.loads((ROOT / "tests" / "doubles" / "trtllm_facts.json").read_text())["versions"]
SECTIONS = [name for name in THEIRS if name != "about"]
ARGUMENTS_OF_BATON = {"config", "override", "NAME"}  # after `--` for TensorRT-LLM


class Row(NamedTuple):
    """One row of a table: their names, ours, and the remark."""

    theirs: list[str]
    ours: list[str]
    remark: str


def rows(section: str) -> Iterator[Row]:
    """Yield the rows of the tables of a section, with the code in their first two columns."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith(("| `", "| other")):
            yield Row(re.findall(r"`([^`]+)`", cells[0]), re.findall(r"`([^`]+)`", cells[1]), "".join(cells[2:]))
            assert cells[1] == "none" or "`" in cells[1], f"{cells[0]} says neither what replaces it nor `none`"


def known_flags() -> set[str]:
    """Return every flag of Baton's settings."""
    listed = [flag for option in options() for flag in (option.flag, *option.aliases)]
    return {
        *listed,
        *(f"--no-{option.flag[2:]}" for option in options() if option.kind == "bool"),
        "--version",
        "--config",
    }


@pytest.mark.parametrize("section", SECTIONS)
def test_every_flag_of_dynamo_has_a_row(section: str) -> None:
    named = {flag.split(" ")[0] for row in rows(section) for flag in row.theirs}
    assert [flag for flag in THEIRS[section] if f"--{flag}" not in named] == []


@pytest.mark.parametrize("section", SECTIONS)
def test_every_flag_of_baton_exists(section: str) -> None:
    for row in rows(section):
        for text in row.ours:
            if not text.startswith("-- "):  # arguments of the engine
                flags = set(re.findall(r"(?<!\S)--[\w-]+", text))
                assert flags <= known_flags(), f"{row.theirs}: {flags - known_flags()}"


@pytest.mark.parametrize("section", SECTIONS)
def test_a_flag_that_has_gone_has_a_reason(section: str) -> None:
    for row in rows(section):
        if not row.ours:
            assert row.remark, f"{row.theirs} has no reason"


def test_every_argument_of_tensorrt_llm_is_one_of_its_versions() -> None:
    named = [
        text.split()[1].removeprefix("--") for row in rows("TensorRT-LLM") for text in row.ours if text[:3] == "-- "
    ]
    fields = {name for version in LIBRARY.values() for name in re.findall(r'"(\w+)"', json.dumps(version["classes"]))}
    assert len(named) > 8
    assert [name for name in named if {*name.split(".")} - fields - ARGUMENTS_OF_BATON] == []


def test_every_variable_of_baton_exists() -> None:
    variables = {option.variable for option in options()}
    named = set(re.findall(r"BATON_[A-Z_]+", PAGE.partition("\n## Variables\n")[2]))
    assert named
    assert named <= variables, named - variables


def test_every_control_route_exists() -> None:
    routes = set(re.findall(r"`(GET|POST) /control/([\w/]+)`", PAGE))
    assert len(routes) > 8
    assert routes <= {(entry.method, entry.path) for entry in COMMAND_PATHS}
