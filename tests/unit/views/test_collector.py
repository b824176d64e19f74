"""The collector with processes that are objects: what it publishes, and that no one of them stops it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from baton.views.collector import UPDATE_REQUESTS, Collector
from baton.views.deployment import ProcessAddress
from baton.views.process_client import ProcessClient
from baton.views.reports import About, ProcessInfo, TimelinePage, TimelineReport

WORKER = ProcessAddress(name="8000/worker-0", url="http://127.0.0.1:1")
INFO = ProcessInfo(name="worker-0", role="aggregated")


class Worker(ProcessClient):
    """A process without a connection; `pages` returns its timelines."""

    def __init__(self) -> None:
        self.pages: Callable[[int], TimelinePage] = lambda after: page([])

    async def about(self, process: ProcessAddress) -> About:
        return About(process=INFO, health="serving")

    async def timelines(self, process: ProcessAddress, after: int, limit: int) -> TimelinePage:
        return page([]) if limit == 0 else self.pages(after)


class Finder:
    """Finds one process; `before` is awaited each time."""

    def __init__(self) -> None:
        self.count = 0
        self.before: Callable[[int], Any] = lambda count: asyncio.sleep(0)
        self.processes = [WORKER]

    async def find(self) -> Sequence[ProcessAddress]:
        self.count += 1
        await self.before(self.count)
        return self.processes


def page(timelines: list[TimelineReport], dropped: int = 0) -> TimelinePage:
    return TimelinePage(process=INFO, now_unix_us=0, next=0, dropped=dropped, timelines=tuple(timelines))


def request(number: int, state: str | None, duration_us: int = 10) -> TimelineReport:
    return TimelineReport(
        request_id=f"r{number}", trace_id=f"t{number}", started_unix_us=number, state=state, duration_us=duration_us
    )


@asynccontextmanager
async def collecting(finder: Finder, worker: Worker) -> AsyncIterator[Collector]:
    collector = Collector(finder, worker)
    running = asyncio.create_task(collector.run())
    try:
        async with asyncio.timeout(20):
            yield collector
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def states_until(collector: Collector, done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the state of each request by its trace, as a browser has it, once `done`."""
    states: dict[str, Any] = {}
    with collector.watched(), collector.subscribers.subscribed() as queue:
        while not done(states):
            event = await queue.get()
            assert event is not None
            update = msgspec.json.decode(event.split(b"data: ")[1])
            states |= {each["id"]: each["state"] for each in update["requests"]}
    return states


def test_that_there_is_no_process_is_published_once_it_is_known() -> None:
    async def body() -> None:
        finder, looked = Finder(), asyncio.Event()
        finder.processes = []
        finder.before = lambda count: looked.wait()
        async with collecting(finder, Worker()) as collector:
            with collector.watched(), collector.subscribers.subscribed() as queue:
                assert collector.snapshot()["has_looked"] is False
                looked.set()
                event = await queue.get()
                assert event is not None
                update = msgspec.json.decode(event.split(b"data: ")[1])
                assert (update["has_looked"], update["processes"]) == (True, [])

    asyncio.run(body())


def test_every_request_that_ends_is_published_however_many_change_at_once() -> None:
    async def run() -> None:
        worker, count = Worker(), UPDATE_REQUESTS + 200
        ended = [request(number, "completed") for number in range(count // 2)]
        duration = iter(range(10, 1_000_000))

        def pages(after: int) -> TimelinePage:
            running = [request(number, None, next(duration)) for number in range(count // 2, count)]
            return page(ended + running)

        worker.pages = pages
        async with collecting(Finder(), worker) as collector:
            states = await states_until(collector, lambda states: len(states) == count)
        assert list(states.values()).count("completed") == count // 2

    asyncio.run(run())


def test_a_search_that_takes_long_delays_no_update() -> None:
    async def run() -> None:
        finder, worker = Finder(), Worker()
        never = asyncio.Event()
        finder.before = lambda count: never.wait() if count > 1 else asyncio.sleep(0)
        number = iter(range(1_000_000))
        worker.pages = lambda after: page([request(next(number), "completed")])
        async with collecting(finder, worker) as collector:
            await states_until(collector, lambda states: finder.count > 1)
            await states_until(collector, lambda states: len(states) > 2)

    asyncio.run(run())


def test_an_error_that_nothing_handles_does_not_end_the_collection() -> None:
    async def run() -> None:
        finder, worker = Finder(), Worker()

        async def before(count: int) -> None:
            if count == 1:
                raise ValueError("an error of a library")

        finder.before = before
        worker.pages = lambda after: page([request(1, "completed")])
        async with collecting(finder, worker) as collector:
            assert await states_until(collector, bool) == {"t1": "completed"}

    asyncio.run(run())


def test_a_timeline_that_a_busy_process_has_replaced_is_not_lost() -> None:
    async def run() -> None:
        for dropped, state in ((3, "unknown"), (0, "lost")):
            worker = Worker()
            pages = iter([page([request(1, None)])])
            gone = page([], dropped)
            worker.pages = lambda after, pages=pages, gone=gone: next(pages, gone)  # type: ignore[misc]
            async with collecting(Finder(), worker) as collector:
                states = await states_until(collector, lambda states: states.get("t1") is not None)
            assert states == {"t1": state}

    asyncio.run(run())
