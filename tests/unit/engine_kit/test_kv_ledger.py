"""The KV ledger: a router that applies its events in order always has a consistent view."""

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine_kit.block_hash import signed_hash
from baton.engine_kit.kv_ledger import KvLedger
from baton.protocol.events import KvCleared, KvEvent, KvRemoved, KvStored, RoutedRows

SIZE = 2


def tokens(*names: int) -> tuple[int, ...]:
    return tuple(token for name in names for token in (name, name + 100))


def stored(ledger: KvLedger, *names: int, parent: int | None = None) -> list[KvEvent]:
    return ledger.stored(names, tokens(*names), parent)


def test_stored_blocks_are_published_with_parent_rank_adapter_and_salt() -> None:
    ledger = KvLedger(SIZE, dp_rank=3)
    assert stored(ledger, 1, 2) == [KvStored((1, 2), tokens(1, 2), SIZE, None, 3)]
    events = ledger.stored([5], tokens(5), 2, lora_name="l", cache_salt="t")
    assert events == [KvStored((5,), tokens(5), SIZE, 2, 3, "l", "t")]
    assert ledger.published_blocks == {1, 2, 5}


def test_orphans_are_dropped_and_so_are_their_children() -> None:
    ledger = KvLedger(SIZE)
    assert stored(ledger, 2, parent=1) == []
    assert stored(ledger, 3, parent=2) == []
    assert ledger.published_blocks == set()


def test_a_chain_of_blocks_that_are_not_full_is_dropped() -> None:
    ledger = KvLedger(SIZE)
    assert ledger.stored([1, 2], tokens(1)) == []
    assert ledger.stored([], ()) == []


def test_published_blocks_split_a_chain_into_runs() -> None:
    ledger = KvLedger(SIZE)
    stored(ledger, 1, 2)
    stored(ledger, 4, parent=2)
    assert stored(ledger, 1, 2) == [], "a block is not published twice"
    assert stored(ledger, 3, 4, 5, 5, 6, parent=2) == [
        KvStored((3,), tokens(3), SIZE, 2),
        KvStored((5,), tokens(5), SIZE, 4),
        KvStored((6,), tokens(6), SIZE, 5),
    ]


def test_each_run_of_blocks_names_its_own_rows_of_media() -> None:
    ledger = KvLedger(SIZE)
    stored(ledger, 2)
    events = ledger.stored([1, 2, 3], tokens(1, 2, 3), media=[RoutedRows(1, 5, "a"), RoutedRows(5, 6, "b")])
    assert [event.media for event in events if isinstance(event, KvStored)] == [
        (RoutedRows(1, 2, "a"),),
        (RoutedRows(0, 1, "a"), RoutedRows(1, 2, "b")),
    ]


def test_only_published_blocks_are_removed_and_only_once() -> None:
    ledger = KvLedger(SIZE, dp_rank=1)
    stored(ledger, 1, 2)
    assert ledger.removed([2, 9, 2]) == [KvRemoved((2,), 1)]
    assert ledger.removed([2]) == []
    assert stored(ledger, 3, parent=2) == []


def test_cleared_is_published_if_there_is_something_to_clear() -> None:
    ledger = KvLedger(SIZE, dp_rank=1)
    assert ledger.cleared() == []
    stored(ledger, 1)
    assert ledger.cleared() == [KvCleared(1)]
    assert ledger.cleared() == []


def test_a_gap_withdraws_every_block() -> None:
    ledger = KvLedger(SIZE, first_number=0)
    assert ledger.advance(0) == []
    stored(ledger, 1)
    assert ledger.advance(1) == []
    assert ledger.advance(3) == [KvCleared(0)]
    assert stored(ledger, 2, parent=1) == []
    assert stored(ledger, 1) == [KvStored((1,), tokens(1), SIZE)]
    assert ledger.advance(0) == [KvCleared(0)], "an engine that restarts its numbers is a gap"
    assert ledger.advance(1) == []


def test_the_first_number_is_checked_if_it_is_known() -> None:
    assert KvLedger(SIZE, first_number=0).advance(7) == [KvCleared(0)]
    ledger = KvLedger(SIZE)
    assert ledger.advance(7) == []
    assert ledger.advance(8) == []


def test_hashes_wrap_to_signed_64_bit_numbers() -> None:
    assert [signed_hash(name) for name in (7, -5, 2**63, 2**64 - 1, 2**70 + 1)] == [7, -5, -(2**63), -1, 1]


NAMES = st.integers(0, 9)
STORED = st.tuples(st.just("stored"), st.lists(NAMES, max_size=4), st.none() | NAMES)
REMOVED = st.tuples(st.just("removed"), st.lists(NAMES, max_size=4), st.none())
OTHER = st.tuples(st.sampled_from(["cleared", "gap", "advance"]), st.lists(NAMES, max_size=1), st.none())


@given(st.lists(STORED | REMOVED | OTHER, max_size=60))
@settings(max_examples=80, deadline=None)
def test_a_router_can_apply_every_event(steps: list[tuple[str, list[int], int | None]]) -> None:
    ledger, router, number = KvLedger(SIZE, first_number=0), set[int](), 0
    for kind, names, parent in steps:
        match kind:
            case "stored":
                events = stored(ledger, *names, parent=parent)
            case "removed":
                events = ledger.removed(names)
            case "advance":
                number += sum(names)
                events = ledger.advance(number)
                number += 1
            case _:
                events = getattr(ledger, kind)()
        for event in events:
            match event:
                case KvStored():
                    assert event.parent_hash is None or event.parent_hash in router
                    assert len(set(event.block_hashes)) == len(event.block_hashes) > 0
                    assert router.isdisjoint(event.block_hashes)
                    assert event.token_ids == tokens(*event.block_hashes)
                    router.update(event.block_hashes)
                case KvRemoved():
                    assert router.issuperset(event.block_hashes)
                    router.difference_update(event.block_hashes)
                case KvCleared():
                    router.clear()
        assert ledger.published_blocks == router
