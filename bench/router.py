"""`python -m bench.router`: what a global router adds, in Baton and in the reference's pattern.

A client calls one worker: directly, through Baton's router with few and with many pools in its plan, and through a
router written in the reference's pattern. The worker stamps every chunk with the time, so its age at the client is its
latency. Every repeat starts new processes and alternates between the systems.
"""

import argparse
import asyncio
import gc
import io
import os
import pstats
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from timeit import Timer
from typing import Any, NamedTuple

import msgspec
import uvloop

from baton.config.runtime import RuntimeOptions
from baton.errors import BatonError
from baton.ports.runtime import Client, Context, Runtime, Wire
from baton.router.grid import Axis, Grid
from baton.router.plan import Aggregated, Plan, Pool, Retry, RolePlan
from baton.router.pools import PoolState
from baton.router.request_view import view_request
from baton.router.routing_table import RoleRouter
from baton.router.select import select_pool
from baton.runtimes.dynamo.environment import environment
from baton.testing import eventually
from bench.load import percentile, raise_descriptor_limit
from bench.path import PROFILE_LINES, busy_core_s
from bench.peers.stamping_worker import stamped_request
from bench.result_files import describe_machine, git_commit, source_digest
from bench.router_deployment import MAX_PROMPT_TOKENS, Deployment, System
from bench.router_report import (
    MANY_STREAMS,
    OURS,
    PACE_MS,
    SYSTEMS,
    THEIRS,
    Cell,
    Kind,
    Memory,
    RouterResults,
    Selection,
    to_markdown,
)
from bench.systems import SystemFailed, stop

SELECTION_POOLS = (4, 16, 64)
START_TIMEOUT_S = 60.0
TIMEOUT_S = 60.0
OPEN_STREAMS, OPEN_PACE_MS, OPEN_BATCH, OPEN_S = 1000, 1000.0, 50, 2.0
WARM_UP_S = 0.5
RAMP_S = 1.0


class Times(NamedTuple):
    """Counts of requests and chunks, and every latency that the load measured."""

    requests: int
    chunks: int
    nanoseconds: Sequence[int]


@asynccontextmanager
async def running(deployment: Deployment, names: Sequence[str], runtime: Runtime) -> AsyncIterator[dict[str, System]]:
    """Start a deployment, yield its systems once each is ready, stop it, and wait until discovery lists none of it."""
    systems: dict[str, System] = {}
    try:
        routers = deployment.start(names)
        for name in names:
            client = await runtime.client(deployment.path(name))
            await wait_until_ready(client, deployment)
            systems[name] = System(name, client, routers.get(name))
        yield systems
    finally:
        await asyncio.to_thread(stop, deployment.processes)
    await eventually(lambda: not any(system.client.instances() for system in systems.values()), START_TIMEOUT_S, 0.05)


async def wait_until_ready(client: Client, deployment: Deployment) -> None:
    """Return once a request through `client` has succeeded. Raises SystemFailed."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            await client.ready(1.0)
            await read(client, stamped_request(2, 0.0), array("q"))
            return
        except BatonError as error:
            if time.monotonic() > deadline or any(process.poll() is not None for process in deployment.processes):
                raise SystemFailed(f"no response: {error.message}\n{deployment.log_tail()}") from error
        await asyncio.sleep(0.1)


async def read(client: Client, request: Wire, ages: "array[int]", opened: Callable[[], None] | None = None) -> int:
    """Read a whole stream, record the age of every chunk and return the number of chunks."""
    number = 0
    async with aclosing(client.call(request)) as replies:
        async for reply in replies:
            ages.append(time.monotonic_ns() - reply["t"])  # type: ignore[operator]
            if reply["token_ids"] != [number]:
                raise SystemFailed(f"token {number} arrived as {reply['token_ids']}")
            if number == 0 and opened is not None:
                opened()
            number += 1
    return number


async def paced(client: Client, streams: int, seconds: float) -> Times:
    """Streams at the pace of a decoding batch. Staggered starts keep requests and chunks from arriving in bursts."""
    ages, tokens = array("q"), max(2, round(1000 * seconds / PACE_MS))

    async def stream(number: int) -> None:
        await asyncio.sleep(number * RAMP_S / streams)
        if (received := await read(client, stamped_request(tokens, PACE_MS), ages)) != tokens:
            raise SystemFailed(f"received {received} chunks instead of {tokens}")

    await run_all(stream(number) for number in range(streams))
    return Times(streams, len(ages), ages)


async def one_token(client: Client, streams: int, seconds: float) -> Times:
    """Requests of one token, each sent as soon as the previous one has ended."""
    times, end = array("q"), time.monotonic() + seconds

    async def caller() -> None:
        while time.monotonic() < end:
            began = time.monotonic_ns()
            if await read(client, stamped_request(1, 0.0), array("q")) != 1:
                raise SystemFailed("a request of one token received none")
            times.append(time.monotonic_ns() - began)

    await run_all(caller() for _ in range(streams))
    return Times(len(times), len(times), times)


async def run_all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except* (BatonError, SystemFailed) as problems:
        raise SystemFailed(str(problems.exceptions[0])) from problems


LOADS: Mapping[Kind, Callable[[Client, int, float], Coroutine[Any, Any, Times]]] = {
    "paced": paced,
    "one-token": one_token,
}


async def measure(
    deployment: Deployment, system: System, kind: Kind, streams: int, seconds: float, repeat: int
) -> Cell:
    async with asyncio.timeout(seconds + TIMEOUT_S):
        await LOADS[kind](system.client, streams, WARM_UP_S)
        gc.collect()
        busy, ours, router, began = busy_core_s(), deployment.cpu_s(), system.cpu_s(), time.monotonic()
        times = await LOADS[kind](system.client, streams, seconds)
        wall_s = time.monotonic() - began
        router_s, foreign_s = system.cpu_s() - router, busy_core_s() - busy - (deployment.cpu_s() - ours)
    ordered = sorted(times.nanoseconds)
    cell = Cell(
        kind=kind,
        system=system.name,
        streams=streams,
        repeat=repeat,
        requests=times.requests,
        chunks=times.chunks,
        seconds=wall_s,
        p50_us=percentile(ordered, 0.5) / 1000,
        p99_us=percentile(ordered, 0.99) / 1000,
        router_cpu_s=router_s,
        foreign_cores=max(0.0, foreign_s / wall_s),
    )
    each = 1e6 * router_s / (times.chunks if kind == "paced" else times.requests)
    print_line(
        f"{kind:9} {system.name:10} {streams:3}  p50 {cell.p50_us:7.0f} us  p99 {cell.p99_us:7.0f} us  "
        f"{times.chunks / wall_s:7.0f} chunks/s  router {each:5.0f} us each  others {cell.foreign_cores:.1f} cores"
    )
    return cell


async def measure_memory(system: System, repeat: int) -> Memory:
    """Read the router's memory while many nearly idle streams are open."""
    before, opened = system.resident_bytes(), asyncio.Semaphore(0)
    request = stamped_request(round(1000 * TIMEOUT_S / OPEN_PACE_MS), OPEN_PACE_MS)
    tasks: list[asyncio.Task[int]] = []
    try:
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(OPEN_STREAMS // OPEN_BATCH):
                tasks += [
                    asyncio.create_task(read(system.client, request, array("q"), opened.release))
                    for _ in range(OPEN_BATCH)
                ]
                for _ in range(OPEN_BATCH):
                    await opened.acquire()
            await asyncio.sleep(OPEN_S)
        after = system.resident_bytes()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    each = (after - before) / OPEN_STREAMS
    print_line(f"memory    {system.name:10} {OPEN_STREAMS} open: {before >> 20} MiB and {each / 1024:.1f} KiB a stream")
    return Memory(system=system.name, repeat=repeat, streams=OPEN_STREAMS, before_bytes=before, open_bytes=after)


def measure_selection(pools: int, repeat: int, calls: int = 20_000) -> Selection:
    """Time pool selection alone: every pool has a worker, and a retry may use any other pool."""
    router = selection_router(pools)
    view = view_request(stamped_request(1, 0.0, prompt=MAX_PROMPT_TOKENS // 2))

    def choose_pool() -> None:
        select_pool(router.role_plan, view.point, view.priority)

    def choose_route() -> None:
        router.route(view).next()

    select_ns, route_ns = (nanoseconds(choose, calls) for choose in (choose_pool, choose_route))
    return Selection(pools=pools, repeat=repeat, select_ns=select_ns, route_ns=route_ns)


def nanoseconds(call: Callable[[], None], calls: int) -> float:
    """Return the time of one call: the best of five rounds, which excludes most noise."""
    return 1e9 * min(Timer(call).repeat(5, calls)) / calls


def selection_router(pools: int) -> RoleRouter:
    axes = (Axis("length", 0, MAX_PROMPT_TOKENS, pools), Axis("ttft_ms", 0, 1000, 4))
    plan = Plan(
        mode=Aggregated(
            RolePlan(
                pools=tuple(Pool(name=f"pool{n}", path=f"pool{n}.backend.generate", priority=n) for n in range(pools)),
                grid=Grid(axes, tuple(n for n in range(pools) for _ in range(4))),
            )
        ),
        retry=Retry(faster=True, others=True),
    )
    states = [PoolState(pool, OneWorkerClient(), time.monotonic) for pool in plan.roles["aggregated"].pools]
    return RoleRouter("aggregated", plan, states)


class OneWorkerClient:
    """A Client (see `ports/runtime.py`) of a pool with one worker. It is never called."""

    def instances(self) -> list[int]:
        return [1]

    async def ready(self, timeout_s: float) -> list[int]:
        return self.instances()

    async def call(
        self, request: Wire, instance: int | None = None, parent: Context | None = None
    ) -> AsyncGenerator[Wire, None]:
        yield request


async def run(results: RouterResults, runtime: Runtime, work_dir: Path, repeats: int, seconds: float) -> None:
    """Fill `results`. Memory is measured on separate routers; the first system alternates between repeats."""
    for repeat in range(repeats):
        results.selections += [measure_selection(pools, repeat) for pools in SELECTION_POOLS]
        async with running(Deployment(work_dir), (OURS, THEIRS), runtime) as systems:
            for name in (OURS, THEIRS) if repeat % 2 == 0 else (THEIRS, OURS):
                results.memories.append(await measure_memory(systems[name], repeat))
        deployment = Deployment(work_dir)
        async with running(deployment, SYSTEMS, runtime) as systems:
            first = repeat % len(SYSTEMS)
            for kind in LOADS:
                for streams in (1, MANY_STREAMS):
                    for name in (*SYSTEMS[first:], *SYSTEMS[:first]):
                        results.cells.append(await measure(deployment, systems[name], kind, streams, seconds, repeat))


async def run_profiled(runtime: Runtime, work_dir: Path, seconds: float) -> str:
    """Load Baton's router under cProfile; return the most expensive functions."""
    profiles = work_dir / "profiles"
    profiles.mkdir()
    deployment = Deployment(work_dir, profiles)
    async with running(deployment, (OURS,), runtime) as systems:
        await measure(deployment, systems[OURS], "paced", MANY_STREAMS, seconds, 0)
    files = [str(file) for file in profiles.iterdir()]
    if not files:
        raise SystemFailed(f"the router wrote no profile\n{deployment.log_tail()}")
    text = io.StringIO()
    pstats.Stats(*files, stream=text).sort_stats("tottime").print_stats(PROFILE_LINES)
    table = text.getvalue().partition("\n\n")[2]  # the first paragraph is the path of the file
    return re.sub(r"/\S*/(?=baton/|site-packages/|lib/python)", "", table)


@asynccontextmanager
async def client_runtime(work_dir: Path) -> AsyncIterator[Runtime]:
    """The runtime of this process. It reads its environment on import, so that is set first."""
    options = RuntimeOptions(directory=str(work_dir / "discovery"))
    os.environ.update(environment(options))
    from baton.runtimes.dynamo.runtime import DynamoRuntime

    runtime = DynamoRuntime(options)
    await runtime.start()
    try:
        yield runtime
    finally:
        await runtime.shutdown()


async def bench(options: argparse.Namespace, work_dir: Path) -> None:
    out: Path = options.out
    async with client_runtime(work_dir) as runtime:
        if options.profile:
            (out / "router-profile.txt").write_text(await run_profiled(runtime, work_dir, options.seconds))
            return
        source = source_digest()
        results = RouterResults(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=git_commit(),
            command=shlex.join(["python", "-m", "bench.router", *sys.argv[1:]]),
            machine=describe_machine(),
        )
        try:
            await run(results, runtime, work_dir, options.repeats, options.seconds)
        finally:
            results.source_changed = source_digest() != source
            if results.cells:
                (out / "router.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
                (out / "router.md").write_text(to_markdown(results))


@contextmanager
def stderr_to(file: Path) -> Iterator[None]:
    """Redirect the standard error of this process to `file`: the runtime logs a line for every call."""
    saved = os.dup(2)
    with file.open("ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def print_line(line: str) -> None:
    print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.router", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each load lasts")
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the results")
    parser.add_argument("--profile", action="store_true", help="only profile Baton's router")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    raise_descriptor_limit()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit by exception, so that child processes are stopped
    work_dir = Path(tempfile.mkdtemp(prefix="baton-bench-router-"))
    try:
        with stderr_to(work_dir / "own-log"):
            uvloop.run(bench(options, work_dir))
    except (BatonError, SystemFailed, TimeoutError) as failure:
        print(str(failure) or repr(failure), file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
