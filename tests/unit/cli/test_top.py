"""The figures and the table of `baton top`."""

import socket

import msgspec
from click.testing import CliRunner

from baton.cli.top import top
from baton.cli.top_samples import Row, build_row
from baton.cli.top_table import render
from baton.views.deployment import ProcessAddress
from baton.views.reports import About, ErrorReport, ProcessInfo, RankLoad, TimelineReport

NOW_US = 1_000_000_000
ADDRESS = ProcessAddress(name="8000/worker-0", url="http://127.0.0.1:9000")
ABOUT = About(
    process=ProcessInfo(name="8000/worker-0", role="aggregated", model="m", engine="echo"),
    health="serving",
    in_flight=3,
    load=(
        RankLoad(rank=0, running=1, waiting=1, used_blocks=10, total_blocks=100),
        RankLoad(rank=1, running=1, waiting=0, used_blocks=30, total_blocks=100),
    ),
)


def request(started_s: float, duration_s: float | None, tokens: int, first_s: float = 0.0) -> TimelineReport:
    """A request that started `started_s` before now; without a duration it runs."""
    return TimelineReport(
        started_unix_us=NOW_US - int(started_s * 1e6),
        duration_us=None if duration_s is None else int(duration_s * 1e6),
        state=None if duration_s is None else "completed",
        completion_tokens=tokens,
        events=((int(first_s * 1e6), "first_token", {}),),
        gaps_us=(20_000, 20_000),
    )


def test_load_of_all_ranks_is_added() -> None:
    row = build_row(ADDRESS, ABOUT, [], NOW_US)
    assert (row.running, row.waiting, row.used_blocks, row.total_blocks, row.in_flight) == (2, 1, 40, 200, 3)
    assert (row.ttft_p50_ms, row.gap_p50_ms, row.tokens_per_s) == (None, None, 0.0)


def test_rates_are_of_the_last_ten_seconds() -> None:
    old = request(started_s=60, duration_s=20, tokens=1000)
    half = request(started_s=20, duration_s=20, tokens=100)  # half of it within the last ten seconds
    whole = request(started_s=4, duration_s=2, tokens=40, first_s=1)
    runs = request(started_s=5, duration_s=None, tokens=10)
    row = build_row(ADDRESS, ABOUT, [old, half, whole, runs], NOW_US)
    assert row.tokens_per_s == (50 + 40 + 10) / 10
    assert row.requests_per_s == 0.2
    assert row.ttft_p50_ms == 500
    assert row.gap_p50_ms == 20


def test_gaps_of_a_long_answer_are_those_between_two_outputs() -> None:
    long = msgspec.structs.replace(request(started_s=4, duration_s=2, tokens=40), gaps_us=(80_000,), outputs_per_gap=4)
    assert build_row(ADDRESS, ABOUT, [long], NOW_US).gap_p50_ms == 20


def test_failed_requests_are_counted() -> None:
    failed = TimelineReport(
        started_unix_us=NOW_US - 1_000_000, duration_us=10, state="failed", error=ErrorReport(code="stalled")
    )
    assert build_row(ADDRESS, ABOUT, [failed], NOW_US).failed == 1


def test_the_table_fits_the_terminal_and_says_what_is_not_shown() -> None:
    rows = [Row(name=f"8000/decode-{number}", url="", role="decode", state="serving") for number in range(50)]
    rows.append(Row(name="8000/prefill-0", url="", role="prefill", problem="no reply within 3 s"))
    lines = render(rows, width=60, height=20, clock="12:00:00").splitlines()
    assert len(lines) <= 20
    assert all(len(line) <= 60 + len("\x1b[1m\x1b[0m\x1b[31m") for line in lines)
    assert "8000/prefill-0" in lines[3], "by role"
    assert lines[-1].startswith("... and ")
    wide = render(rows, width=300, height=100, clock="12:00:00")
    assert "no reply within 3 s" in wide


def test_the_summary_counts_one_process_and_one_request() -> None:
    rows = [Row(name="8000/worker-0", url="", role="aggregated", state="serving", in_flight=1)]
    summary = render(rows, width=300, height=100, clock="12:00:00").splitlines()[0]
    assert summary == "baton  12:00:00  1 process (1 serving)  1 request in flight  0 tokens/s"


def test_a_table_of_processes_that_cannot_be_read_is_a_failure() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        for arguments in (["--once"], ["--once", "--json"]):
            done = CliRunner().invoke(top, [*arguments, "--url", f"http://{address}"], catch_exceptions=False)
            assert done.exit_code == 1
            assert address in done.stdout
            assert done.stderr.startswith(f"baton: no process can be read ({address}: Cannot connect")
            assert done.stderr.count("\n") == 1
