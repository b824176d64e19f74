"""The request path benchmark: counting events in raw reads, percentiles, process roles and the report."""

from pathlib import Path

import msgspec
import pytest

from bench.load import LoadResult, percentile
from bench.path import Plan, parse_arguments, parse_plan
from bench.report import to_markdown
from bench.result_files import Cell, Machine, Results
from bench.sse import ResponseScanner
from bench.stalled import queued_bytes
from bench.systems import LAUNCHES, Site, SystemFailed, check_response, role_of

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [
    b'data: {"choices":[{"delta":{"content":"a","role":"assistant"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"b"}}]}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11}}\n\n',
    b"data: [DONE]\n\n",
]
RESPONSE = HEAD + b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in EVENTS) + b"0\r\n\r\n"


def test_events_are_counted_once_at_every_split_of_the_reads() -> None:
    for cut in range(1, len(RESPONSE)):
        scanner = ResponseScanner()
        scanner.feed(RESPONSE[:cut])
        assert not scanner.complete
        scanner.feed(RESPONSE[cut:])
        assert (scanner.status, scanner.events, scanner.complete) == (200, 2, True)
        assert scanner.completion_tokens() == 2


def test_an_event_is_counted_in_the_read_that_completes_it() -> None:
    scanner = ResponseScanner()
    cut = RESPONSE.index(b'tent":"b"')
    assert [scanner.feed(RESPONSE[:cut]), scanner.feed(RESPONSE[cut:])] == [1, 1]


def test_an_error_status_is_read_without_a_body() -> None:
    scanner = ResponseScanner()
    scanner.feed(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
    assert (scanner.status, scanner.complete, scanner.completion_tokens()) == (503, False, None)


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, fraction) for fraction in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([], 0.99) == 0.0


def test_percentile_counts_leading_zeros() -> None:
    assert percentile([7.0], 0.99, leading_zeros=99) == 0.0
    assert percentile([7.0, 8.0], 0.99, leading_zeros=98) == 7.0


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("python -m baton worker --engine echo", "worker"),
        ("python -m baton frontend --port 8000", "frontend"),
        ("python -m baton serve --engine echo", "other"),
        ("python -m bench.peers.reference_worker --pace-ms 0", "worker"),
        ("python -m bench.peers.reference_frontend --port 1", "frontend"),
        ("python -m bench.peers.fastapi_server --port 1", "frontend"),
    ],
)
def test_the_role_of_a_process_follows_from_its_command_line(command: str, role: str) -> None:
    assert role_of(command.split()) == role


def test_a_response_with_a_missing_token_fails_the_check() -> None:
    body = b"".join(EVENTS)
    check_response(body, 2)
    with pytest.raises(SystemFailed, match="requested 3"):
        check_response(body, 3)


def test_the_first_system_alternates_between_repeats() -> None:
    plan = Plan(systems=("baton", "fastapi", "baton-eager"))
    firsts = [plan.systems_at(0.0, repeat)[0] for repeat in range(4)]
    assert firsts == ["baton", "fastapi", "baton-eager", "baton"]
    assert plan.systems_at(20.0, 0) == ["baton", "fastapi"]


def test_an_older_baton_is_measured_beside_this_one_where_its_checkout_is_given(tmp_path: Path) -> None:
    plan = parse_plan(parse_arguments(["--before", str(tmp_path), "--systems", "baton", "--tokens", "1024"]))
    assert plan.systems_at(0.0, 0) == ["baton", "before"]
    assert plan.tokens == 1024
    site = Site(8000, tmp_path)
    [older], [eager] = (LAUNCHES[name](plan.setup(0.0), site) for name in ("before", "baton-eager"))
    assert older.env == {**eager.env, "PYTHONPATH": str(tmp_path / "src")}
    assert older.argv == eager.argv
    assert parse_plan(parse_arguments([])).systems_at(0.0, 0) == [
        "baton",
        "reference",
        "push",
        "fastapi",
        "baton-eager",
    ]


def test_parts_of_a_run_can_be_chosen() -> None:
    assert parse_plan(parse_arguments(["--parts", "paced,unpaced"])).parts == ("unpaced", "paced")
    with pytest.raises(SystemExit):
        parse_arguments(["--parts", "all"])


def test_unread_bytes_are_counted_at_both_ends_of_the_connection() -> None:
    table = """  sl  local_address rem_address   st tx_queue rx_queue
   0: 0100007F:4650 0100007F:C0E4 01 00001000:00000007 00:00000000
   1: 0100007F:C0E4 0100007F:4650 01 00000003:00000100 00:00000000
   2: 0100007F:4650 0100007F:C0E6 01 00002000:00000000 00:00000000
"""
    assert queued_bytes(table, server_port=0x4650, client_port=0xC0E4) == 0x1100


def test_options_override_the_quick_plan() -> None:
    plan = parse_plan(parse_arguments(["--quick", "--streams", "2,4", "--systems", "fastapi"]))
    assert (plan.flat_streams, plan.paced_streams, plan.systems, plan.repeats) == (
        (2, 4),
        (2, 4),
        ("fastapi",),
        1,
    )


def test_report_gives_medians_spread_ratios_and_marks_invalid_cells() -> None:
    cells = [
        cell("baton", repeat=0, tokens=1280),
        cell("baton", repeat=1, tokens=1280, duration_s=2.0),
        cell("fastapi", repeat=0, tokens=1280, duration_s=2.0),
        cell("fastapi", repeat=1, tokens=1279),
    ]
    text = to_markdown(results(cells))
    assert "| 16 | baton | 960 (640-1,280) |" in text
    assert "| 16 | fastapi | 640 1 invalid |" in text
    assert "| 16 | baton | 1.50x |" in text
    assert "4 cells, 1 invalid" in text


def test_report_warns_when_the_source_changed_during_the_run() -> None:
    cells = [cell("baton", repeat=0, tokens=1280)]
    assert "source changed" in to_markdown(results(cells, source_changed=True))
    assert "source changed" not in to_markdown(results(cells))


def test_results_are_equal_after_a_json_round_trip() -> None:
    before = results([cell("baton", repeat=0, tokens=1280)])
    assert msgspec.json.decode(msgspec.json.encode(before), type=Results) == before


def cell(system: str, *, repeat: int, tokens: int, duration_s: float = 1.0) -> Cell:
    return Cell(
        kind="stream",
        system=system,
        pace_ms=0.0,
        streams=16,
        tokens_per_request=128,
        repeat=repeat,
        load=load_result(tokens, duration_s),
        cpu_s={"frontend": 0.01},
        rss_start_bytes={"frontend": 1 << 20},
        rss_open_bytes={"frontend": 2 << 20},
        foreign_cores=0.1,
    )


def load_result(tokens: int, duration_s: float) -> LoadResult:
    return LoadResult(
        requests=10,
        tokens=tokens,
        events=tokens,
        duration_s=duration_s,
        ttft_ms_p50=1.0,
        ttft_ms_p99=2.0,
        gap_ms_p99=3.0,
        request_ms_p50=4.0,
        request_ms_p99=5.0,
        cpu_s=0.5,
        errors={},
    )


def results(cells: list[Cell], source_changed: bool = False) -> Results:
    machine = Machine(cores=2, cpu="cpu", memory_bytes=1, system="linux", python="3.11", versions={})
    date = "2026-01-01T00:00:00+00:00"
    return Results(
        date=date,
        commit="",
        command="run",
        source_changed=source_changed,
        machine=machine,
        cells=cells,
    )
