"""The router benchmark: its plan, its loads, its peer and its report."""

from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import msgspec
import pytest

from baton.ports.runtime import Client, Context, Service, Wire
from baton.router.request_view import view_request
from baton.router.select import select_pool
from baton.router.topology_file import read_topology
from baton.testing import run_bounded
from baton.testing.memory_runtime import MemoryRuntime
from bench.peers.reference_router import ReferenceRouter
from bench.peers.stamping_worker import as_is, generate, stamped_request
from bench.result_files import Machine
from bench.router import measure_selection, one_token, paced, read, selection_router
from bench.router_deployment import topology
from bench.router_report import (
    DIRECT,
    OURS,
    SYSTEMS,
    Cell,
    Kind,
    Memory,
    RouterResults,
    Selection,
    paired,
    spread,
    to_markdown,
)
from bench.systems import SystemFailed

PATH = "bench.backend.generate"


async def served(handle: object) -> Client:
    runtime = MemoryRuntime()
    await runtime.start()
    await runtime.serve(PATH, Service(handle, as_is, as_is))  # type: ignore[arg-type]
    return await runtime.client(PATH)


@pytest.mark.parametrize("pools", [4, 32])
def test_the_plan_is_valid_and_routes_short_prompts_to_the_pool_with_a_worker(tmp_path: Path, pools: int) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(msgspec.json.encode(topology(pools)))
    plan = read_topology(file, "bench-baton").plan.roles["aggregated"]
    choice = select_pool(plan, view_request(stamped_request(1, 0.0)).point)
    assert plan.pools[choice.pool].path == "bench-pool0.backend.generate"
    assert len(plan.pools) == pools


def test_the_loads_count_requests_and_chunks_and_record_latencies() -> None:
    async def body() -> None:
        client = await served(generate)
        times = await paced(client, streams=3, seconds=0.04)
        assert (times.requests, times.chunks, len(times.nanoseconds)) == (3, 6, 6)
        assert all(0 < age < 10**9 for age in times.nanoseconds)
        times = await one_token(client, streams=2, seconds=0.05)
        assert times.requests == times.chunks == len(times.nanoseconds) > 2

    run_bounded(body())


def test_a_lost_chunk_fails_the_run() -> None:
    async def lossy(request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
        async for reply in generate(request, context):
            if reply["token_ids"] != [1]:
                yield reply

    async def body() -> None:
        client = await served(lossy)
        with pytest.raises(SystemFailed, match=r"token 1 arrived as \[2\]"):
            await read(client, stamped_request(3, 0.0), array("q"))
        with pytest.raises(SystemFailed):
            await paced(client, streams=2, seconds=0.1)

    run_bounded(body())


def test_the_reference_router_selects_by_the_same_grid() -> None:
    class PoolClient:
        def __init__(self, number: int) -> None:
            self.number = number

        async def generate(self, request: Wire) -> AsyncIterator[int]:
            async def stream() -> AsyncIterator[int]:
                yield self.number

            return stream()

    async def body() -> None:
        router = ReferenceRouter([PoolClient(n) for n in range(4)], 1000, range(4))
        plan = selection_router(4).role_plan
        for length in (0, 249, 250, 999, 5000):
            request = stamped_request(1, 0.0, prompt=length)
            assert [item async for item in router.generate(request)] == [
                select_pool(plan, view_request(request).point).pool
            ]

    run_bounded(body())


def test_selection_is_timed_for_any_number_of_pools() -> None:
    for pools in (1, 64):
        found = measure_selection(pools, 0, calls=100)
        assert min(found.select_ns, found.route_ns) > 0


def cell(kind: Kind, system: str, streams: int, repeat: int, p50_us: float) -> Cell:
    return Cell(
        kind=kind,
        system=system,
        streams=streams,
        repeat=repeat,
        requests=100,
        chunks=1000,
        seconds=2.0,
        p50_us=p50_us,
        p99_us=2 * p50_us,
        router_cpu_s=0.0 if system == DIRECT else 0.05,
        foreign_cores=0.1,
    )


def test_the_report_has_every_system_and_takes_differences_within_a_repeat() -> None:
    machine = Machine(cores=2, cpu="some", memory_bytes=1, system="linux", python="3", versions={})
    results = RouterResults(date="2026-01-01", commit="", command="bench", machine=machine)
    results.cells += [
        cell(kind, system, streams, repeat, (repeat + 1) * 1000 + 10 * place)
        for kind in ("paced", "one-token")
        for streams in (1, 64)
        for repeat in range(3)
        for place, system in enumerate(SYSTEMS)
    ]
    results.memories.append(Memory(system=OURS, repeat=0, streams=500, before_bytes=2**20, open_bytes=3 * 2**20))
    results.selections.append(Selection(pools=4, repeat=0, select_ns=900, route_ns=1800))
    report = to_markdown(results)
    ours = "| Baton, 4 pools | 2,010 (1,010 to 3,010) | 4,020 (2,020 to 6,020) | 10 (10 to 10) | 20 (20 to 20) |"
    assert report.count(f"{ours} 50 (50 to 50) |") == 2  # a chunk
    assert report.count(f"{ours} 500 (500 to 500) |") == 1  # a request
    assert "| Baton, 4 pools | 50 (50 to 50) | 1.00 (1.00 to 1.00) | 500 (500 to 500) |" in report
    assert "| Baton, 4 pools | 1 (1 to 1) | 4 (4 to 4) |" in report
    assert "| Dynamo's pattern, 4 pools | - | - |" in report
    assert "| 4 | 900 (900 to 900) | 1,800 (1,800 to 1,800) |" in report


def test_only_values_of_the_same_repeat_are_compared() -> None:
    assert paired({0: 5.0, 1: 6.0}, {1: 2.0, 2: 3.0}) == [(6.0, 2.0)]
    assert spread([], ".0f") == "-"
