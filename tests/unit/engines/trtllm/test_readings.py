"""Load and KV events of the engine: polled from the start, in spite of errors, and published in order."""

import asyncio
import logging
import subprocess
import sys
from typing import Any

import pytest

from baton.engines.trtllm.readings import Poll, Readings, kv_capacity
from baton.protocol.events import KvCleared, KvStored, LoadSnapshot
from baton.testing import eventually, run_bounded
from tests.unit.engines.trtllm.test_kv_events import SIZE, EventWriter, block


def stat(used: int, rank: int | None = None, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "iter": 1,
        "numActiveRequests": 2,
        "numQueuedRequests": 1,
        "kvCacheStats": {"usedNumBlocks": used, "maxNumBlocks": 100, "tokensPerBlock": SIZE},
    }
    return fields | changes | ({} if rank is None else {"attentionDpRank": rank})


async def next_of(reading: Any, count: int) -> list[Any]:
    return [await asyncio.wait_for(anext(reading), 2) for _ in range(count)]


def test_load_is_published_by_rank_from_the_start() -> None:
    async def body() -> None:
        readings = Readings(SIZE, 100, ranks=2)
        reading = readings.read()
        assert await next_of(reading, 2) == [LoadSnapshot(0, 0, 0, 100, 0), LoadSnapshot(0, 0, 0, 100, 1)]
        readings.add_stats([stat(3, 1), stat(9, 1), {"iter": 2}])
        assert await next_of(reading, 1) == [LoadSnapshot(2, 1, 9, 100, 1)]
        assert (readings.steps, readings.running) == (3, 2)
        readings.set_idle()
        assert await next_of(reading, 1) == [LoadSnapshot(0, 0, 0, 100, 1)]
        readings.close()
        assert [each async for each in reading] == []

    run_bounded(body())


def test_events_of_unknown_format_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        readings, writer = Readings(SIZE, 100, ranks=1), EventWriter()
        unknown: list[dict[str, Any]] = [
            {},
            {"data": 1},
            writer.event({"type": "stored"}),
            writer.stored({"block_hash": 1}),
        ]
        readings.add_events([*unknown, writer.stored(block(1))])
        assert await next_of(readings.read(), 1) == [KvStored((1,), (0, 1, 2, 3), SIZE)]

    run_bounded(body())
    assert len(caplog.records) == 1


def test_an_event_of_unknown_format_withdraws_the_blocks_of_its_rank() -> None:
    async def body() -> None:
        readings, writer = Readings(SIZE, 100, ranks=1), EventWriter()
        readings.add_events([writer.stored(block(1)), writer.event({"type": "removed"}), writer.stored(block(2))])
        published = await next_of(readings.read(), 3)
        stored = [KvStored((name,), (0, 1, 2, 3), SIZE) for name in (1, 2)]
        assert published == [stored[0], KvCleared(0), stored[1]]

    run_bounded(body())


def test_unread_events_beyond_the_limit_become_one_cleared_event() -> None:
    async def body() -> None:
        readings, writer = Readings(SIZE, 100, ranks=1, max_events=10), EventWriter()
        readings.add_events([writer.stored(block(name)) for name in range(11)])
        readings.add_events([writer.stored(block(50))])
        published = await next_of(readings.read(), 2)
        assert published == [KvCleared(0), KvStored((50,), (0, 1, 2, 3), SIZE)]

    run_bounded(body())


def test_the_capacity_of_the_cache_is_in_the_statistics() -> None:
    assert kv_capacity([]) is None
    assert kv_capacity([{"iter": 1}, {"kvCacheStats": None}]) is None
    assert kv_capacity([stat(0)]) == (100, SIZE)


def test_d19_a_poll_survives_errors_and_logs_consecutive_ones_once(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        fetches, delivered = 0, list[Any]()

        def fetch(timeout_s: float) -> list[dict[str, object]]:
            nonlocal fetches
            fetches += 1
            if fetches in (1, 2, 4):
                raise (AssertionError if fetches == 1 else RuntimeError)("not yet")
            return [{"iter": fetches}]

        poll = Poll("load", fetch, delivered.extend, interval_s=0.01)
        poll.start()
        await eventually(lambda: len(delivered) >= 3)
        poll.stop()
        assert delivered[:2] == [{"iter": 3}, {"iter": 5}]
        assert poll.errors == 3

    with caplog.at_level(logging.WARNING):
        run_bounded(body())
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"], "once for consecutive errors"


def test_a_poll_keeps_its_interval_when_the_call_returns_at_once() -> None:
    async def body() -> None:
        fetches = 0

        def fetch(timeout_s: float) -> list[dict[str, object]]:
            nonlocal fetches
            fetches += 1
            return []

        poll = Poll("load", fetch, lambda items: None, interval_s=0.05)
        poll.start()
        await asyncio.sleep(0.3)
        poll.stop()
        assert fetches <= 8

    run_bounded(body())


@pytest.mark.process
def test_d21_imports_do_not_change_logging_or_import_the_library() -> None:
    code = (
        "import logging, sys; import baton.engines.trtllm.adapter, baton.engines.trtllm.encoder; "
        "print(logging.getLogger().handlers, logging.getLogger().level, "
        "[name for name in sys.modules if name.split('.')[0] in ('tensorrt_llm', 'torch')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[] 30 []"
