"""Frames: every message survives the wire in any cut, and bytes that are no message are refused."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import (
    BatonError,
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    EngineDead,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    PeerLost,
)
from baton.ports.transfer import KvMemory, KvShape
from baton.transfer import wire
from baton.transfer.wire import failed, failure

SHAPE = KvShape(model="m", dtype="bfloat16", layers=2, kv_heads=1, head_dim=8, block_size=16)
MEMORY = KvMemory(shape=SHAPE, address=4096, planes=4, plane_bytes=4096, block_bytes=256, blocks=16)
MESSAGES: list[wire.Message] = [
    wire.Claim(2**63 - 1, bytes(range(16)), MEMORY),
    wire.Accepted("lender", MEMORY, ("shm", "tcp"), 77),
    wire.Open("shm"),
    wire.Opened("shm", {"socket": "name", "metadata": b"\0\1"}),
    wire.Opened("nixl", problem="not here"),
    wire.Computed(tuple(range(100)), True, 16),
    wire.Taken(),
    wire.Released(),
    wire.Failed("cancelled", "the client left"),
    wire.Beat(),
]
STREAM = b"".join(map(wire.encode, MESSAGES))


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_messages_survive_any_cut(cuts: list[int]) -> None:
    frames, got, places = wire.Frames(), [], [0, *sorted(cuts), len(STREAM)]
    for start, stop in itertools.pairwise(places):
        got += frames.feed(STREAM[start:stop])
    assert got == MESSAGES


@given(st.integers(0, len(wire.encode(MESSAGES[0])) - 1), st.integers(1, 255))
def test_a_changed_byte_is_noticed(place: int, change: int) -> None:
    data = bytearray(wire.encode(MESSAGES[0]))
    data[place] ^= change
    try:
        got = list(wire.Frames().feed(bytes(data)))
    except PeerLost:
        return
    assert got == [], "a length that grew within the limit waits for more; nothing wrong is ever returned"
    assert place < 4


def test_a_frame_that_is_too_long_is_refused_before_it_is_kept() -> None:
    with pytest.raises(PeerLost, match="longer than any may be"):
        list(wire.Frames().feed(wire.HEAD.pack(wire.MAX_FRAME_BYTES + 1, 0)))


def test_what_is_no_message_is_refused() -> None:
    import zlib

    body = b"\x81\xa4type\xa5other"
    with pytest.raises(PeerLost, match="cannot be read"):
        list(wire.Frames().feed(wire.HEAD.pack(len(body), zlib.crc32(body)) + body))


def test_preambles_are_of_one_length() -> None:
    assert {len(wire.LINE), len(wire.DATA)} == {wire.PREAMBLE_BYTES}


@pytest.mark.parametrize(
    ("error", "arrives_as"),
    [
        (InvalidRequest("no"), InvalidRequest),
        (ContextTooLong("long"), ContextTooLong),
        (DeadlineExceeded("late"), DeadlineExceeded),
        (EngineFailed("step"), EngineFailed),
        (Cancelled("left"), Cancelled),
        (Overloaded("full"), PeerLost),
        (Draining("going"), PeerLost),
        (EngineDead("dead"), PeerLost),
        (PeerLost("gone"), PeerLost),
    ],
)
def test_only_what_would_fail_everywhere_fails_here(error: BatonError, arrives_as: type[BatonError]) -> None:
    arrived = failure(failed(error))
    assert type(arrived) is arrives_as
    assert arrived.message == error.message
    assert arrived.scope == "request", "the other worker's death is not ours"
