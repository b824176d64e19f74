"""`baton router check`: what it draws and explains, and one line for what is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from baton.cli.main import cli

POOLS = """
mode: disaggregated
defaults: {itl_ms: 40}
settings: {transfer: {handoff: late}}
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


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, ["router", "check", *map(str, words)])


def story(output: str, part: str) -> list[str]:
    """Return what is said of the request in a part."""
    text = output.partition(f"{part}: ")[2].partition("This request")[2].partition("\n\n")[0]
    return [line.strip() for line in f"This request{text}".splitlines()]


def test_a_file_is_drawn_and_summed_up(file: Path) -> None:
    result = run(file)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "prefill: 2 pools, by length and ttft_ms\n" in result.output
    assert "decode: 2 pools, by context and itl_ms\n" in result.output
    assert "baton-prefill-short.prefill.generate" in result.output
    assert "This request" not in result.output
    assert result.output.splitlines()[-4:] == [
        "without targets  ttft_ms is the middle of its axis, itl_ms is 40",
        "after a failure  faster pools",
        "adaptive         no",
        "workers          2 for prefill pool short",
    ]


def test_pools_are_named_after_the_routers_namespace(file: Path) -> None:
    assert "prod-decode-fast.decode.generate" in run(file, "--namespace", "prod").output


def test_a_small_file_is_summed_up(tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(UNIFIED)
    assert run(tmp_path / "all.yaml").output.splitlines()[-4:] == [
        "without targets  nothing changes",
        "after a failure  no retry",
        "adaptive         yes",
        "workers          none are started from this file",
    ]


def test_a_request_is_explained(file: Path) -> None:
    output = run(file, "--isl", 1500, "--osl", 3000, "--ttft-ms", 100).output
    assert "▶ long ◀" in output
    assert story(output, "prefill") == [
        "This request goes to long.",
        "length       1500 (given), so bucket 1: 1024 to 2048",
        "ttft_ms      100 (given), so bucket 0: 50 to 1050",
        "chosen by    the grid, mapping[1][0]",
        "if it fails  short",
    ]
    assert story(output, "decode") == [
        "This request goes to slow.",
        "context      4500 (prompt 1500, answer 3000, past the axis), so bucket 1: 2048 to 4096",
        "itl_ms       40 (not given, the file's default), so bucket 1: 35 to 60",
        "chosen by    the grid, mapping[1][1]",
        "if it fails  fast",
    ]


def test_what_a_request_does_not_say_is_explained(file: Path) -> None:
    output = run(file, "--itl-ms", 0).output
    assert story(output, "prefill")[1:3] == [
        "length       0 (not given), so bucket 0: 0 to 1024",
        "ttft_ms      1050 (not given, the middle of the axis), so bucket 1: 1050 to 2050",
    ]
    assert story(output, "decode")[1:] == [
        "context      0 (prompt not given, answer not given), so bucket 0: 0 to 2048",
        "itl_ms       0 (given, before the axis), so bucket 0: 10 to 35",
        "chosen by    the grid, mapping[0][0]",
        "if it fails  nowhere, there is no faster pool",
    ]


@pytest.mark.parametrize(
    ("priority", "pool", "reason"),
    [
        (7, "short", "overrides[1], priority 5 to 10; mapping[1][0] is long"),
        (0, "long", "overrides[0], priority 0 to 2; mapping[1][0] is long"),
        (3, "long", "the grid, mapping[1][0]; no override has priority 3"),
    ],
)
def test_the_override_that_decides_is_named(file: Path, priority: int, pool: str, reason: str) -> None:
    told = story(run(file, "--isl", 1500, "--ttft-ms", 1, "--priority", priority).output, "prefill")
    assert told[0] == f"This request goes to {pool}."
    assert told[3] == f"chosen by    {reason}"


def test_where_a_request_goes_after_failures_is_told_in_order(tmp_path: Path) -> None:
    path = tmp_path / "pools.yaml"
    path.write_text(
        "mode: aggregated\nretry: {others: true}\naggregated: {pools: [{name: a}, {name: b}, {name: c}], mapping: b}"
    )
    assert story(run(path, "--isl", 1).output, "aggregated")[-1] == "if it fails  a, then c"
    path.write_text(UNIFIED)
    assert story(run(path, "--isl", 1).output, "aggregated") == [
        "This request goes to all.",
        "chosen by    the mapping, without axes",
        "if it fails  nowhere, retry is off",
    ]


@pytest.mark.parametrize(
    "words", [["--isl", "-1"], ["--osl", "9" * 400], ["--ttft-ms", "-1"], ["--itl-ms", "nan"], ["--ttft-ms", "inf"]]
)
def test_what_no_request_can_say_is_refused(file: Path, words: list[str]) -> None:
    result = run(file, *words)
    assert result.exit_code == 2
    assert words[0] in result.stderr


def test_what_is_wrong_is_said_in_one_line_with_exit_2(file: Path) -> None:
    file.write_text(POOLS.replace("[slow, slow]", "[slow]"))
    result = run(file)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"baton: {file}: decode.mapping[1]: has 1 entry, itl_ms has 2 buckets\n"


def test_the_page_shows_what_the_command_prints(file: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/router.md").read_text()
    file.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    command, _, shown = page.partition("$ baton router check pools.yaml ")[2].partition("```")[0].partition("\n")
    assert run(file, *command.split()).stdout == shown.lstrip("\n")


def baton(*words: object) -> "subprocess.CompletedProcess[str]":
    command = [str(Path(sys.executable).with_name("baton")), "router", "check", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_real_process_says_the_same(file: Path) -> None:
    done = baton(file, "--isl", 7)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run(file, "--isl", 7).stdout
    missing = baton(file.with_name("nowhere.yaml"))
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr == f"baton: cannot read {file.with_name('nowhere.yaml')}: No such file or directory\n"


def test_a_real_process_warns_of_what_can_hardly_be_meant(file: Path) -> None:
    file.write_text(POOLS.replace("[[fast, slow], [slow, slow]]", "[[fast, fast], [fast, fast]]"))
    done = baton(file)
    assert (done.returncode, done.stderr) == (0, f"{file}: decode: no request can reach slow\n")
