"""`baton router check`: the rendered plan, the explained request, and errors in one line."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from baton.cli.main import cli

POOLS = """
mode: disaggregated
defaults: {itl_ms: 40}
settings: {kv: {handoff: late}}
prefill:
  pools:
    - {name: short, workers: {count: 2}}
    - {name: long}
  axes:
    - {name: length, min: 0, max: 2048, buckets: 2}
    - {name: ttft_ms, min: 50, max: 2050, buckets: 2}
  mapping: [[short, short], [long, short]]
  overrides: [{min: 0, max: 2, pool: long}, {min: 5, max: 10, pool: short}]
decode:
  pools: [{name: fast}, {name: slow}]
  axes:
    - {name: context, min: 0, max: 4096, buckets: 2}
    - {name: itl_ms, min: 10, max: 60, buckets: 2}
  mapping: [[fast, slow], [slow, slow]]
"""
UNIFIED = "mode: aggregated\nretry: {faster: false}\nadaptive: true\naggregated: {pools: [{name: all}]}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pools.yaml"
    path.write_text(POOLS)
    return path


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["router", "check", *map(str, args)])


def decision(output: str, role: str) -> list[str]:
    """Return the lines about the request in a role."""
    text = output.partition(f"{role}: ")[2].partition("This request")[2].partition("\n\n")[0]
    return [line.strip() for line in f"This request{text}".splitlines()]


def test_plan_is_rendered_with_a_summary(file: Path) -> None:
    result = run(file)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "prefill: 2 pools, by length and ttft_ms\n" in result.output
    assert "decode: 2 pools, by context and itl_ms\n" in result.output
    assert "baton-prefill-short.prefill.generate" in result.output
    assert "This request" not in result.output
    assert result.output.splitlines()[-4:] == [
        "default targets  ttft_ms is the middle of its axis, itl_ms is 40",
        "retry in         faster pools",
        "adaptive         no",
        "workers          2 for prefill pool short",
    ]


def test_namespaces_of_pools_start_with_the_namespace_of_the_router(file: Path) -> None:
    assert "prod-decode-fast.decode.generate" in run(file, "--namespace", "prod").output


def test_minimal_plan_is_rendered_with_a_summary(tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(UNIFIED)
    assert run(tmp_path / "all.yaml").output.splitlines()[-4:] == [
        "default targets  none",
        "retry in         no pool",
        "adaptive         yes",
        "workers          none are started from this file",
    ]


def test_routing_of_a_request_is_explained(file: Path) -> None:
    output = run(file, "--isl", 1500, "--osl", 3000, "--ttft-ms", 100).output
    assert "▶ long ◀" in output
    assert decision(output, "prefill") == [
        "This request goes to pool long.",
        "length       1500 (given), bucket 1: 1024 to 2048",
        "ttft_ms      100 (given), bucket 0: 50 to 1050",
        "selected by  the grid, mapping[1][0]",
        "on failure   retried in short",
    ]
    assert decision(output, "decode") == [
        "This request goes to pool slow.",
        "context      4500 (prompt 1500, output 3000, above the axis), bucket 1: 2048 to 4096",
        "itl_ms       40 (not given, default of the file), bucket 1: 35 to 60",
        "selected by  the grid, mapping[1][1]",
        "on failure   retried in fast",
    ]


def test_missing_values_of_a_request_are_explained(file: Path) -> None:
    output = run(file, "--itl-ms", 0).output
    assert decision(output, "prefill")[1:3] == [
        "length       0 (not given), bucket 0: 0 to 1024",
        "ttft_ms      1050 (not given, middle of the axis), bucket 1: 1050 to 2050",
    ]
    assert decision(output, "decode")[1:] == [
        "context      0 (prompt not given, output not given), bucket 0: 0 to 2048",
        "itl_ms       0 (given, below the axis), bucket 0: 10 to 35",
        "selected by  the grid, mapping[0][0]",
        "on failure   not retried, there is no faster pool",
    ]


@pytest.mark.parametrize(
    ("priority", "pool", "reason"),
    [
        (7, "short", "overrides[1], priority 5 to 10; mapping[1][0] is long"),
        (0, "long", "overrides[0], priority 0 to 2; mapping[1][0] is long"),
        (3, "long", "the grid, mapping[1][0]; no override has priority 3"),
    ],
)
def test_matching_override_is_named(file: Path, priority: int, pool: str, reason: str) -> None:
    lines = decision(run(file, "--isl", 1500, "--ttft-ms", 1, "--priority", priority).output, "prefill")
    assert lines[0] == f"This request goes to pool {pool}."
    assert lines[3] == f"selected by  {reason}"


def test_retry_order_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "pools.yaml"
    path.write_text(
        "mode: aggregated\nretry: {others: true}\naggregated: {pools: [{name: a}, {name: b}, {name: c}], mapping: b}"
    )
    assert decision(run(path, "--isl", 1).output, "aggregated")[-1] == "on failure   retried in a, then c"
    path.write_text(UNIFIED)
    assert decision(run(path, "--isl", 1).output, "aggregated") == [
        "This request goes to pool all.",
        "selected by  the mapping, without axes",
        "on failure   not retried, retry is off",
    ]


@pytest.mark.parametrize(
    "args", [["--isl", "-1"], ["--osl", "9" * 400], ["--ttft-ms", "-1"], ["--itl-ms", "nan"], ["--ttft-ms", "inf"]]
)
def test_invalid_options_are_refused(file: Path, args: list[str]) -> None:
    result = run(file, *args)
    assert result.exit_code == 2
    assert args[0] in result.stderr


def test_invalid_file_is_reported_in_one_line_with_exit_code_2(file: Path) -> None:
    file.write_text(POOLS.replace("[slow, slow]", "[slow]"))
    result = run(file)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"baton: {file}: decode.mapping[1]: has 1 entry, itl_ms has 2 buckets\n"


def test_docs_show_the_output_of_the_command(file: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/router.md").read_text()
    file.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    command, _, shown = page.partition("$ baton router check pools.yaml ")[2].partition("```")[0].partition("\n")
    assert run(file, *command.split()).stdout == shown.lstrip("\n")


def baton(*args: object) -> "subprocess.CompletedProcess[str]":
    command = [str(Path(sys.executable).with_name("baton")), "router", "check", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.process
def test_output_of_a_real_process_is_the_same(file: Path) -> None:
    done = baton(file, "--isl", 7)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run(file, "--isl", 7).stdout
    missing = baton(file.with_name("nowhere.yaml"))
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr == f"baton: cannot read {file.with_name('nowhere.yaml')}: No such file or directory\n"


@pytest.mark.process
def test_real_process_warns_about_an_unreachable_pool(file: Path) -> None:
    file.write_text(POOLS.replace("[[fast, slow], [slow, slow]]", "[[fast, fast], [fast, fast]]"))
    done = baton(file)
    assert (done.returncode, done.stderr) == (0, f"{file}: decode: no request can reach slow\n")
