"""KV events of TensorRT-LLM become events that a router can apply in order."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engines.trtllm.kv_events import KvEvents
from baton.protocol.events import KvCleared, KvEvent, KvRemoved, KvStored

SIZE = 4


def block(name: int | str | None, tokens: int = SIZE, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "type": "stored_block",
        "block_hash": name,
        "tokens": [{"type": "unique_token", "token_id": at, "token_extra_id": 0} for at in range(tokens)],
        "cache_level": 0,
        "priority": 35,
        "mm_keys": [],
    }
    return fields | changes


class EventWriter:
    """Writes events in the library's format, with consecutive ids."""

    def __init__(self, **envelope: Any) -> None:
        self.number = 0
        self.envelope = envelope

    def event(self, data: dict[str, Any], **changes: Any) -> dict[str, Any]:
        event = {"event_id": self.number, "data": data, "window_size": 4096} | self.envelope | changes
        self.number += 1
        return event

    def created(self, window: int) -> dict[str, Any]:
        return self.event({"type": "created", "num_blocks_per_cache_level": [9, 0]}, window_size=window)

    def stored(self, *blocks: Any, parent: Any = None, **changes: Any) -> dict[str, Any]:
        return self.event({"type": "stored", "parent_hash": parent, "blocks": list(blocks)}, **changes)

    def removed(self, *names: Any, **changes: Any) -> dict[str, Any]:
        return self.event({"type": "removed", "block_hashes": list(names)}, **changes)


def translated(events: KvEvents, raw: dict[str, Any]) -> list[KvEvent]:
    return list(events.translate(raw))


def test_blocks_are_published_with_their_tokens_after_their_parents() -> None:
    writer, events = EventWriter(), KvEvents(SIZE)
    assert translated(events, writer.created(4096)) == []
    assert translated(events, writer.stored(block(1), block(2))) == [KvStored((1, 2), (0, 1, 2, 3) * 2, SIZE)]
    assert translated(events, writer.stored(block(3), parent=2)) == [KvStored((3,), (0, 1, 2, 3), SIZE, parent_hash=2)]
    assert translated(events, writer.removed(3, 1)) == [KvRemoved((3, 1))]
    assert translated(events, writer.removed(3)) == [], "it is removed once"
    assert translated(events, writer.stored(block(4), parent=3)) == [], "its parent is not published"


@pytest.mark.parametrize(("name", "published"), [(2**63, -(2**63)), (2**64 - 1, -1), (-5, -5), (7, 7), ("ff" * 32, -1)])
def test_block_hashes_are_signed_64_bit_numbers(name: int | str, published: int) -> None:
    writer, events = EventWriter(), KvEvents(SIZE)
    (stored,) = translated(events, writer.stored(block(name)))
    assert isinstance(stored, KvStored)
    assert stored.block_hashes == (published,)
    assert translated(events, writer.removed(name)) == [KvRemoved((published,))]


@pytest.mark.parametrize(
    "odd",
    [block(2, tokens=3), block(2, tokens=5), block(None), block(2, mm_keys=[{"hash": 1}]), block(2, cache_salt="x")],
    ids=["not full", "too full", "no name", "with media", "another salt"],
)
def test_a_chain_ends_before_a_block_that_cannot_be_published(odd: dict[str, Any]) -> None:
    writer, events = EventWriter(), KvEvents(SIZE)
    assert translated(events, writer.stored(block(1), odd, block(3))) == [KvStored((1,), (0, 1, 2, 3), SIZE)]
    assert translated(events, writer.stored(block(4), parent=2)) == []
    assert translated(events, writer.removed(2, 3)) == []


def test_events_have_salt_and_rank() -> None:
    writer, events = EventWriter(attention_dp_rank=3), KvEvents(SIZE)
    (stored,) = translated(events, writer.stored(block(1, cache_salt="tenant")))
    assert isinstance(stored, KvStored)
    assert (stored.dp_rank, stored.cache_salt) == (3, "tenant")


def test_d20_events_of_narrower_windows_are_dropped() -> None:
    writer, events = EventWriter(), KvEvents(SIZE)
    published: list[Any] = []
    for event in (
        writer.created(128),
        writer.created(4096),
        writer.stored(block(1), window_size=128),
        writer.stored(block(2), window_size=4096),
        writer.removed(2, window_size=128),
        writer.stored(block(3), window_size=128),
    ):
        published += events.translate(event)
    assert published == [KvStored((2,), (0, 1, 2, 3), SIZE)]


def test_d20_a_wider_window_withdraws_the_blocks_of_a_narrower_one() -> None:
    writer, events = EventWriter(), KvEvents(SIZE)
    assert translated(events, writer.stored(block(1), window_size=128)) == [KvStored((1,), (0, 1, 2, 3), SIZE)]
    assert translated(events, writer.stored(block(2), window_size=4096)) == [
        KvCleared(0),
        KvStored((2,), (0, 1, 2, 3), SIZE),
    ]
    assert translated(events, writer.stored(block(3), window_size=128)) == []


def test_d20_events_without_windows_are_published() -> None:
    events = KvEvents(SIZE)
    raw = {"event_id": 0, "data": {"type": "stored", "parent_hash": None, "blocks": [block(1)]}}
    assert translated(events, raw) == [KvStored((1,), (0, 1, 2, 3), SIZE)]


def test_d20_events_of_one_layer_group_are_published() -> None:
    writer, events = EventWriter(), KvEvents(SIZE)
    assert translated(events, writer.stored(block("a"), layer_group_id=0))
    assert translated(events, writer.stored(block("b"), layer_group_id=1)) == []


def test_d20_blocks_that_are_not_full_are_never_published() -> None:
    writer, events = EventWriter(), KvEvents(SIZE)
    for name in range(2000):
        assert translated(events, writer.stored(block(name, tokens=2))) == []
        assert translated(events, writer.removed(name)) == []


def test_a_gap_in_the_event_ids_withdraws_the_blocks_of_that_rank_only() -> None:
    zero, one, events = EventWriter(attention_dp_rank=0), EventWriter(attention_dp_rank=1), KvEvents(SIZE)
    for writer in (zero, one):
        translated(events, writer.stored(block(1)))
    one.number += 5
    assert translated(events, one.stored(block(2))) == [KvCleared(1), KvStored((2,), (0, 1, 2, 3), SIZE, dp_rank=1)]
    assert translated(events, one.removed(1)) == [], "it has been withdrawn"
    assert translated(events, zero.removed(1)) == [KvRemoved((1,), 0)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=60))
@settings(max_examples=80, deadline=None)
def test_a_router_can_apply_every_sequence_of_events(steps: list[tuple[int, int, int, bool]]) -> None:
    writer, events, held = EventWriter(), KvEvents(SIZE), set[int]()
    for kind, name, parent, lost in steps:
        writer.number += lost
        event = writer.removed(name) if kind == 0 else writer.stored(block(name), parent=parent if kind == 1 else None)
        for published in events.translate(event):
            match published:
                case KvStored():
                    assert published.parent_hash is None or published.parent_hash in held
                    held.update(published.block_hashes)
                case KvRemoved():
                    assert held.issuperset(published.block_hashes)
                    held.difference_update(published.block_hashes)
                case KvCleared():
                    held.clear()
