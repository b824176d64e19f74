"""`baton experts plan`: its output, the layout file, and errors in one line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from baton.cli.main import cli
from baton.config.engines import ExpertOptions
from baton.engines.sglang.experts import Parallelism, expert_arguments


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "dump.json"
    path.write_text(json.dumps({"logical_count": [[0, 0, 0, 0], [8, 7, 6, 5], [30, 10, 1, 1]]}))
    return path


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["experts", "plan", *map(str, args)])


def test_plan_is_printed_and_written_in_a_usable_file(dump: Path, tmp_path: Path) -> None:
    out = tmp_path / "layout.json"
    result = run(dump, "--ranks", 2, "--redundant", 2, "--out", out)
    assert result.exit_code == 0, result.output
    assert (
        "3 layers, 1 of them without load; 4 experts and 2 redundant on 2 ranks, 3 slots each; global" in result.output
    )
    assert f"baton worker --engine sglang --experts-layout {out} --experts-redundant 2" in result.output
    assert expert_arguments(ExpertOptions(layout=str(out), redundant=2), Parallelism(2))


def test_table_compares_trivial_and_planned_layout(dump: Path) -> None:
    # Trivial: 15 and 11, 40 and 2. Planned: 13 and 13; 30 alone is more than the other three.
    lines = run(dump, "--ranks", 2).output.splitlines()
    table = {line[:34].strip(): line[34:].split("  ") for line in lines[2:7]}
    cells = {key: [cell.strip() for cell in value if cell.strip()] for key, value in table.items()}
    assert cells == {
        "": ["trivial", "planned"],
        "balancedness, mean of layers": ["0.696", "0.839"],
        "balancedness, worst layer": ["0.525 (layer 2)", "0.677 (layer 2)"],
        "busiest rank / mean rank": ["1.53x", "1.24x"],
        "busiest rank / mean, worst layer": ["1.90x", "1.48x"],
    }
    assert lines[-1] == "The layout was not written; use --out FILE to write it."


def test_groups_stay_on_one_node(dump: Path, tmp_path: Path) -> None:
    out = tmp_path / "layout.json"
    result = run(dump, "--ranks", 2, "--nodes", 2, "--groups", 2, "--out", out)
    assert "2 ranks of 2 nodes, 2 slots each; hierarchical" in result.output
    rows = json.loads(out.read_text())["physical_to_logical_map"]
    assert all({row[0] // 2, row[1] // 2} in ({0}, {1}) for row in rows)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ranks", "3"], "4 experts and 0 redundant experts cannot be divided over 3 ranks: use 2, 5, ..."),
        (["--ranks", "2", "--algorithm", "hierarchical"], "needs the number of expert groups"),
        (
            ["--ranks", "2", "--out", "layout.txt"],
            "layout.txt must end in .json or .pt: SGLang chooses the format by suffix",
        ),
        (["--ranks", "2", "--out", "nowhere/layout.json"], "cannot write nowhere/layout.json"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(dump: Path, args: list[str], message: str) -> None:
    result = run(dump, *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_dump_is_never_overwritten(dump: Path) -> None:
    before = dump.read_bytes()
    result = run(dump, "--ranks", 2, "--out", dump)
    assert result.exit_code == 2
    assert "is the dump itself" in result.stderr
    assert dump.read_bytes() == before


@pytest.mark.parametrize("args", [[], ["--ranks", "0"], ["--ranks", "2", "--redundant", "-1"]])
def test_options_out_of_bounds_are_refused(dump: Path, args: list[str]) -> None:
    assert run(dump, *args).exit_code == 2
