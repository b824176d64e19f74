"""The benchmark of the edge: which cells a line of its table compares, and how."""

import msgspec

from bench.edge import SYSTEMS, order
from bench.edge_report import BARE, EAGER, EDGE, PACED_MS, to_markdown
from bench.load import LoadResult
from bench.result_files import Cell, Kind, Machine, Results

LOAD = LoadResult(
    requests=10,
    tokens=1280,
    events=1280,
    duration_s=1.0,
    ttft_ms_p50=1.0,
    ttft_ms_p99=2.0,
    gap_ms_p99=3.0,
    request_ms_p50=4.0,
    request_ms_p99=5.0,
    cpu_s=0.1,
    errors={},
)


def cell(
    system: str,
    tokens: int,
    *,
    kind: Kind = "stream",
    streams: int = 64,
    pace_ms: float = 0.0,
    repeat: int = 0,
    **load: float,
) -> Cell:
    cpu_s = load.pop("frontend_s", 1.0)
    return Cell(
        kind=kind,
        system=system,
        pace_ms=pace_ms,
        streams=streams,
        tokens_per_request=tokens,
        repeat=repeat,
        load=msgspec.structs.replace(LOAD, requests=1280 // tokens, **load),
        cpu_s={"frontend": cpu_s, "worker": 9.0},
        rss_start_bytes={"frontend": 0, "worker": 0},
        rss_open_bytes={"frontend": 64 * 1024 * (12 if system == EDGE else 2), "worker": 0},
        foreign_cores=0.0,
    )


def lines(cells: list[Cell]) -> dict[str, list[str]]:
    machine = Machine(cores=2, cpu="a CPU", memory_bytes=1, system="Linux", python="3.11", versions={})
    results = Results(
        date="2026-01-01",
        commit="abc",
        command="x",
        source_changed=False,
        machine=machine,
        cells=cells,
    )
    rows = [line.strip("| ").split(" | ") for line in to_markdown(results).splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


def test_each_line_compares_the_cells_of_its_load() -> None:
    seen = lines(
        [
            cell(EDGE, 1, streams=1, ttft_ms_p50=1.5, frontend_s=0.256),
            cell(BARE, 1, streams=1, ttft_ms_p50=1.25, frontend_s=0.128),
            cell(EDGE, 128, duration_s=2.0),
            cell(BARE, 128, duration_s=1.0),
            cell(EDGE + EAGER, 128, frontend_s=0.0256),
            cell(BARE + EAGER, 128, frontend_s=0.0128),
            cell(EDGE, 128, pace_ms=PACED_MS, frontend_s=0.0512),
            cell(BARE, 128, pace_ms=PACED_MS, frontend_s=0.0128),
            cell(EDGE, 128, kind="idle"),
            cell(BARE, 128, kind="idle"),
        ]
    )
    assert seen["first token, 1 stream, ms"] == ["1.50", "1.25", "0.25", "at most 0.3"]
    assert seen["CPU per request of one token, 1 streams, us"] == ["200", "100", "100", "at most 60"]
    assert seen["tokens/s, 64 streams"] == ["640", "1,280", "0.50x", "at least 0.9"]
    assert seen["CPU per event, 64 streams, eager, us"] == ["20.0", "10.0", "10.0", "at most 8"]
    assert seen["CPU per event, 64 streams, paced, us"] == ["40.0", "10.0", "30.0", "at most 8"]
    assert seen["memory per idle stream, KiB"] == ["12.0", "2.00", "10.0", "at most 12"]


def test_only_repeats_of_both_systems_are_compared() -> None:
    invalid = msgspec.structs.replace(
        cell(BARE, 1, streams=1, repeat=1), load=msgspec.structs.replace(LOAD, errors={"timeout": 1})
    )
    cells = [cell(EDGE, 1, streams=1, repeat=repeat, ttft_ms_p50=2.0 + repeat) for repeat in (0, 1)]
    seen = lines([*cells, cell(BARE, 1, streams=1), invalid])
    assert seen["first token, 1 stream, ms"] == ["2.50 (2.00 to 3.00)", "1.00", "1.00", "at most 0.3"]


def test_the_systems_alternate() -> None:
    assert order(0) == [*reversed(order(1))]
    assert {name.removesuffix(EAGER) for name in SYSTEMS} == {EDGE, BARE}
