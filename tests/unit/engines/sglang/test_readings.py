"""What SGLang tells while it runs, decoded."""

import json
from types import SimpleNamespace

import msgspec
import pytest

from baton.engines.sglang.kv_events import RankEvents
from baton.engines.sglang.readings import FrozenProcesses, at_rank, load_of, published_at
from baton.errors import ConfigError
from baton.protocol.events import KvCleared, KvRemoved, KvStored, LoadSnapshot

PAGE = 4


def stored(names: list[int], parent: int | None = None, **more: object) -> dict[str, object]:
    tokens = [token for name in names for token in range(name, name + PAGE)]
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": PAGE,
        "lora_id": None,
        "medium": "GPU",
        **more,
    }


def removed(names: list[int], medium: str = "GPU") -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": names, "medium": medium}


def batch(*events: dict[str, object]) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def test_a_process_that_stays_stopped_counts_as_dead() -> None:
    frozen = FrozenProcesses()
    assert frozen.problem(7, "S", 0.0) is None
    assert frozen.problem(7, "T", 1.0) is None
    assert frozen.problem(7, "R", 9.0) is None, "it was continued"
    assert frozen.problem(7, "T", 10.0) is None
    assert frozen.problem(8, "T", 19.0) is None, "each process has a clock of its own"
    assert frozen.problem(7, "T", 20.0) == "has been stopped for 10 s"
    for state in ("", "Z", "X"):
        assert frozen.problem(9, state, 0.0) == "has died"


def test_d18_load_is_in_blocks() -> None:
    snapshot = SimpleNamespace(
        timestamp=1.0,
        dp_rank=2,
        num_running_reqs=3,
        num_waiting_reqs=4,
        num_used_tokens=33,
        max_total_num_tokens=8192,
    )
    assert load_of(snapshot, 16) == LoadSnapshot(3, 4, 3, 512, 2), "a block that is partly used is used"
    assert load_of(snapshot, 1) == LoadSnapshot(3, 4, 33, 8192, 2)


def test_blocks_are_published_with_parent_rank_and_salt() -> None:
    rank = RankEvents(1, PAGE)
    events = rank.read(0, batch(stored([10, 20]), stored([30], 20, cache_salt="t", lora_name="l")))
    assert events == [
        KvStored((10, 20), (10, 11, 12, 13, 20, 21, 22, 23), PAGE, None, 1),
        KvStored((30,), (30, 31, 32, 33), PAGE, 20, 1, "l", "t"),
    ]
    assert rank.read(1, batch(removed([30, 99]))) == [KvRemoved((30,), 1)], "an unpublished block is not removed"
    assert rank.read(2, batch({"type": "AllBlocksCleared"})) == [KvCleared(1)]
    assert rank.read(3, batch({"type": "AllBlocksCleared"})) == [], "there is nothing left to clear"


def test_a_gap_clears_everything_and_orphans_are_not_published() -> None:
    rank = RankEvents(0, PAGE)
    rank.read(0, batch(stored([10, 20])))
    events = rank.read(2, batch(stored([40], 30), stored([50]), stored([60], 50)))
    assert events == [
        KvCleared(0),
        KvStored((50,), (50, 51, 52, 53), PAGE, None, 0),
        KvStored((60,), (60, 61, 62, 63), PAGE, 50, 0),
    ]
    assert rank.read(3, batch(removed([20, 60]))) == [KvRemoved((60,), 0)]


def test_a_publisher_that_begins_again_is_a_gap() -> None:
    rank = RankEvents(0, PAGE)
    rank.read(0, batch(stored([10])))
    rank.read(1, batch())
    assert rank.read(0, batch()) == [KvCleared(0)]


@pytest.mark.parametrize("rubbish", [b"", b"\xc1", msgspec.msgpack.encode(7), batch({"type": "BlockStored"})])
def test_a_message_that_cannot_be_read_is_a_gap(rubbish: bytes) -> None:
    rank = RankEvents(0, PAGE)
    rank.read(0, batch(stored([10])))
    assert rank.read(1, rubbish) == [KvCleared(0)]
    assert rank.read(2, batch(stored([20], 10))) == [], "its parent is not known any more"


def test_slower_memory_does_not_count() -> None:
    rank = RankEvents(0, PAGE)
    rank.read(0, batch(stored([10])))
    assert rank.read(1, batch(stored([20], 10, medium="CPU_PINNED"), removed([10], "CPU_PINNED"))) == []
    assert rank.read(2, batch(removed([10]))) == [KvRemoved((10,), 0)]


def test_pairs_of_speculative_decoding_are_read_as_tokens() -> None:
    pairs = [[1, 2], [2, 3], [3, 4], [4, 5]]
    (event,) = RankEvents(0, PAGE).read(0, batch(stored([10]) | {"token_ids": pairs}))
    assert isinstance(event, KvStored)
    assert event.token_ids == (1, 2, 3, 4)


def test_what_stands_for_media_is_published_in_32_bits() -> None:
    tokens = [1, 2**62 + 5, 2**62 + 6, 2**31 - 1]
    (event,) = RankEvents(0, PAGE).read(0, batch(stored([10]) | {"token_ids": tokens}))
    assert isinstance(event, KvStored)
    assert event.token_ids == (1, 2**31 + 5, 2**31 + 6, 2**31 - 1)


def test_a_block_that_is_not_full_is_not_published() -> None:
    partial = stored([10]) | {"token_ids": [1, 2], "block_size": 2}
    assert RankEvents(0, PAGE).read(0, batch(partial)) == []


def test_names_are_signed() -> None:
    (event,) = RankEvents(0, PAGE).read(0, batch(stored([10]) | {"block_hashes": [2**64 - 1]}))
    assert isinstance(event, KvStored)
    assert event.block_hashes == (-1,)


@pytest.mark.parametrize(
    ("config", "endpoint"),
    [
        ({"publisher": "zmq", "endpoint": "tcp://*:6000"}, "tcp://127.0.0.1:6000"),
        ({"publisher": "zmq", "endpoint": "ipc:///tmp/kv"}, "ipc:///tmp/kv"),
        ({"publisher": "zmq"}, "tcp://127.0.0.1:5557"),
        ({"publisher": "null", "endpoint": "tcp://*:6000"}, None),
        ({"endpoint": "tcp://*:6000"}, None),
        ({"publisher": "zmq", "endpoint": "tcp://10.0.0.9:6000"}, None),
    ],
)
def test_where_a_person_lets_it_publish(config: dict[str, str], endpoint: str | None) -> None:
    assert published_at(json.dumps(config)) == endpoint


def test_a_configuration_of_events_that_is_none_is_refused() -> None:
    for broken in ("{", "[]", "7"):
        with pytest.raises(ConfigError, match="kv-events-config"):
            published_at(broken)


def test_every_rank_has_the_next_port() -> None:
    assert [at_rank("tcp://127.0.0.1:6000", rank) for rank in (0, 1, 3)] == [
        "tcp://127.0.0.1:6000",
        "tcp://127.0.0.1:6001",
        "tcp://127.0.0.1:6003",
    ]
