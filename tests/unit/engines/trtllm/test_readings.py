"""What the engine tells of itself: polled from the start, whatever goes wrong, and told so that a router can use it."""

import asyncio
import logging
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engines.trtllm import readings as module
from baton.engines.trtllm.kv_events import KvView
from baton.engines.trtllm.polls import Poll
from baton.engines.trtllm.readings import Readings, kv_capacity
from baton.protocol.events import KvCleared, KvRemoved, KvStored, LoadSnapshot
from baton.testing import eventually, run_bounded

SIZE = 4


def block(name: int | str | None, tokens: int = SIZE, **changes: Any) -> dict[str, Any]:
    told: dict[str, Any] = {
        "type": "stored_block",
        "block_hash": name,
        "tokens": [{"type": "unique_token", "token_id": at, "token_extra_id": 0} for at in range(tokens)],
        "cache_level": 0,
        "priority": 35,
        "mm_keys": [],
    }
    return told | changes


class Engine:
    """Writes events as the engine does, with numbers that follow each other."""

    def __init__(self, **envelope: Any) -> None:
        self.number = 0
        self.envelope = envelope

    def event(self, data: dict[str, Any], **changes: Any) -> dict[str, Any]:
        told = {"event_id": self.number, "data": data, "window_size": 4096} | self.envelope | changes
        self.number += 1
        return told

    def created(self, window: int) -> dict[str, Any]:
        return self.event({"type": "created", "num_blocks_per_cache_level": [9, 0]}, window_size=window)

    def stored(self, *blocks: Any, parent: Any = None, **changes: Any) -> dict[str, Any]:
        return self.event({"type": "stored", "parent_hash": parent, "blocks": list(blocks)}, **changes)

    def removed(self, *names: Any, **changes: Any) -> dict[str, Any]:
        return self.event({"type": "removed", "block_hashes": list(names)}, **changes)


def test_blocks_are_told_with_their_tokens_after_their_parents() -> None:
    engine, view = Engine(), KvView(SIZE)
    assert view.take(engine.created(4096)) == []
    assert view.take(engine.stored(block(1), block(2))) == [KvStored((1, 2), (0, 1, 2, 3) * 2, SIZE)]
    assert view.take(engine.stored(block(3), parent=2)) == [KvStored((3,), (0, 1, 2, 3), SIZE, parent_hash=2)]
    assert view.take(engine.removed(3, 1)) == [KvRemoved((3, 1))]
    assert view.take(engine.removed(3)) == [], "gone once"
    assert view.take(engine.stored(block(4), parent=3)) == [], "nobody knows its parent"


@pytest.mark.parametrize(("name", "told"), [(2**63, -(2**63)), (2**64 - 1, -1), (-5, -5), (7, 7), ("ff" * 32, -1)])
def test_names_of_blocks_are_signed_64_bit_numbers(name: int | str, told: int) -> None:
    engine, view = Engine(), KvView(SIZE)
    (stored,) = view.take(engine.stored(block(name)))
    assert isinstance(stored, KvStored)
    assert stored.block_hashes == (told,)
    assert view.take(engine.removed(name)) == [KvRemoved((told,))]


@pytest.mark.parametrize(
    "odd",
    [block(2, tokens=3), block(2, tokens=5), block(None), block(2, mm_keys=[{"hash": 1}]), block(2, cache_salt="x")],
    ids=["not full", "too full", "no name", "with media", "another salt"],
)
def test_what_follows_a_block_that_cannot_be_told_is_not_told(odd: dict[str, Any]) -> None:
    engine, view = Engine(), KvView(SIZE)
    assert view.take(engine.stored(block(1), odd, block(3))) == [KvStored((1,), (0, 1, 2, 3), SIZE)]
    assert view.take(engine.stored(block(4), parent=2)) == []
    assert view.take(engine.removed(2, 3)) == []


def test_salt_and_rank_are_told() -> None:
    engine, view = Engine(attention_dp_rank=3), KvView(SIZE)
    (stored,) = view.take(engine.stored(block(1, cache_salt="tenant")))
    assert isinstance(stored, KvStored)
    assert (stored.dp_rank, stored.cache_salt) == (3, "tenant")


def test_d20_events_of_other_windows_never_pass() -> None:
    engine, view = Engine(), KvView(SIZE)
    told: list[Any] = []
    for event in (
        engine.created(128),
        engine.created(4096),
        engine.stored(block(1), window_size=128),
        engine.stored(block(2), window_size=4096),
        engine.removed(2, window_size=128),
        engine.stored(block(3), window_size=128),
    ):
        told += view.take(event)
    assert told == [KvStored((2,), (0, 1, 2, 3), SIZE)]


def test_d20_a_wider_window_that_comes_late_starts_anew() -> None:
    engine, view = Engine(), KvView(SIZE)
    assert view.take(engine.stored(block(1), window_size=128)) == [KvStored((1,), (0, 1, 2, 3), SIZE)]
    assert view.take(engine.stored(block(2), window_size=4096)) == [
        KvCleared(0),
        KvStored((2,), (0, 1, 2, 3), SIZE),
    ]
    assert view.take(engine.stored(block(3), window_size=128)) == []


def test_d20_a_cache_without_windows_tells_everything() -> None:
    view = KvView(SIZE)
    raw = {"event_id": 0, "data": {"type": "stored", "parent_hash": None, "blocks": [block(1)]}}
    assert view.take(raw) == [KvStored((1,), (0, 1, 2, 3), SIZE)]


def test_d20_one_group_of_layers_speaks_for_all() -> None:
    engine, view = Engine(), KvView(SIZE)
    assert view.take(engine.stored(block("a"), layer_group_id=0))
    assert view.take(engine.stored(block("b"), layer_group_id=1)) == []


def test_d20_what_is_remembered_is_never_more_than_what_was_told() -> None:
    """Blocks that are not full come and go without end in a long life; none of them is kept."""
    engine, view = Engine(), KvView(SIZE)
    for name in range(2000):
        assert view.take(engine.stored(block(name, tokens=2))) == []
        assert view.take(engine.removed(name)) == []


def test_a_gap_in_the_numbers_starts_anew_for_that_rank_only() -> None:
    zero, one, view = Engine(attention_dp_rank=0), Engine(attention_dp_rank=1), KvView(SIZE)
    for engine in (zero, one):
        view.take(engine.stored(block(1)))
    one.number += 5
    assert view.take(one.stored(block(2))) == [KvCleared(1), KvStored((2,), (0, 1, 2, 3), SIZE, dp_rank=1)]
    assert view.gaps == 1
    assert view.take(one.removed(1)) == [], "it has been told gone"
    assert view.take(zero.removed(1)) == [KvRemoved((1,), 0)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=60))
@settings(max_examples=200, deadline=None)
def test_whatever_the_engine_tells_a_router_can_follow(steps: list[tuple[int, int, int, bool]]) -> None:
    engine, view, held = Engine(), KvView(SIZE), set[int]()
    for kind, name, parent, lost in steps:
        engine.number += lost
        event = engine.removed(name) if kind == 0 else engine.stored(block(name), parent=parent if kind == 1 else None)
        for told in view.take(event):
            match told:
                case KvStored():
                    assert told.parent_hash is None or told.parent_hash in held
                    held.update(told.block_hashes)
                case KvRemoved():
                    assert held.issuperset(told.block_hashes)
                    held.difference_update(told.block_hashes)
                case KvCleared():
                    held.clear()


def stat(used: int, rank: int | None = None, **changes: Any) -> dict[str, Any]:
    told: dict[str, Any] = {
        "iter": 1,
        "numActiveRequests": 2,
        "numQueuedRequests": 1,
        "kvCacheStats": {"usedNumBlocks": used, "maxNumBlocks": 100, "tokensPerBlock": SIZE},
    }
    return told | changes | ({} if rank is None else {"attentionDpRank": rank})


async def next_of(reading: Any, count: int) -> list[Any]:
    return [await asyncio.wait_for(anext(reading), 2) for _ in range(count)]


def test_load_is_told_by_rank_from_the_start() -> None:
    async def body() -> None:
        readings = Readings(SIZE, 100, ranks=2)
        reading = readings.read()
        assert await next_of(reading, 2) == [LoadSnapshot(0, 0, 0, 100, 0), LoadSnapshot(0, 0, 0, 100, 1)]
        readings.take_stats([stat(3, 1), stat(9, 1), {"iter": 2}])
        assert await next_of(reading, 1) == [LoadSnapshot(2, 1, 9, 100, 1)]
        assert (readings.steps, readings.running) == (3, 2)
        readings.idle()
        assert await next_of(reading, 1) == [LoadSnapshot(0, 0, 0, 100, 1)]
        readings.close()
        assert [told async for told in reading] == []

    run_bounded(body())


def test_an_event_of_no_known_shape_is_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        readings, engine = Readings(SIZE, 100, ranks=1), Engine()
        odd: list[dict[str, Any]] = [
            {},
            {"data": 1},
            engine.event({"type": "stored"}),
            engine.stored({"block_hash": 1}),
        ]
        readings.take_events([*odd, engine.stored(block(1))])
        assert await next_of(readings.read(), 1) == [KvStored((1,), (0, 1, 2, 3), SIZE)]

    run_bounded(body())
    assert len(caplog.records) == 1


def test_events_that_nobody_reads_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        readings, engine = Readings(SIZE, 100, ranks=1), Engine()
        readings.take_events([engine.stored(block(name)) for name in range(11)])
        readings.take_events([engine.stored(block(50))])
        told = await next_of(readings.read(), 2)
        assert told == [KvCleared(0), KvStored((50,), (0, 1, 2, 3), SIZE)]

    monkeypatch.setattr(module, "MAX_EVENTS", 10)
    run_bounded(body())


def test_the_size_of_the_cache_is_in_the_stats() -> None:
    assert kv_capacity([]) is None
    assert kv_capacity([{"iter": 1}, {"kvCacheStats": None}]) is None
    assert kv_capacity([stat(0)]) == (100, SIZE)


def test_d19_a_poll_survives_every_error_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        asked, heard = 0, list[Any]()

        def ask(wait_s: float) -> list[dict[str, object]]:
            nonlocal asked
            asked += 1
            if asked in (1, 2, 4):
                raise (AssertionError if asked == 1 else RuntimeError)("not yet")
            return [{"iter": asked}]

        poll = Poll("load", ask, heard.extend, pace_s=0.01)
        poll.start()
        await eventually(lambda: len(heard) >= 3)
        poll.stop()
        assert heard[:2] == [{"iter": 3}, {"iter": 5}]
        assert poll.errors == 3

    with caplog.at_level(logging.WARNING):
        run_bounded(body())
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"], "once for each row of errors"


def test_a_poll_asks_at_its_pace_even_when_the_answer_comes_at_once() -> None:
    async def body() -> None:
        asked = 0

        def ask(wait_s: float) -> list[dict[str, object]]:
            nonlocal asked
            asked += 1
            return []

        poll = Poll("load", ask, lambda items: None, pace_s=0.05)
        poll.start()
        await asyncio.sleep(0.3)
        poll.stop()
        assert asked <= 8

    run_bounded(body())


def test_d21_logging_is_left_alone() -> None:
    code = (
        "import logging, sys; import baton.engines.trtllm.adapter, baton.engines.trtllm.help; "
        "print(logging.getLogger().handlers, logging.getLogger().level, "
        "[name for name in sys.modules if name.split('.')[0] in ('tensorrt_llm', 'torch')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[] 30 []"
