"""Frames: messages decode from any split of the stream, and invalid bytes are refused."""

import itertools

import msgspec
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
from baton.ports.transfer import BlockMemory, KvShape
from baton.protocol.handoff import MAX_SECRET_BYTES
from baton.protocol.media import EncodedItem, PlacedItem
from baton.transfer import wire

SHAPE = KvShape(model="m", dtype="bfloat16", layers=2, kv_heads=1, head_dim=8, block_size=16)
MEMORY = BlockMemory(shape=SHAPE, address=4096, planes=4, plane_bytes=4096, block_bytes=256, blocks=16)
ITEM = EncodedItem(
    modality="video",
    content_hash="ab",
    expansion=((5, 1), (7, 2)),
    embed_token=7,
    rows=2,
    grid=((1, 2, 3),),
    timestamps=(0.5,),
)
MESSAGES: list[wire.Message] = [
    wire.Claim(2**63 - 1, bytes(range(16)), MEMORY),
    wire.Accepted("producer", MEMORY, ("shm", "tcp"), 77),
    wire.Accepted("producer", None, (), 77, ("10.0.0.9", 8998)),
    wire.Open("shm"),
    wire.Opened("shm", {"socket": "name", "metadata": b"\0\1"}),
    wire.Opened("nixl", problem="not here"),
    wire.Placed((PlacedItem(item=ITEM, index=3),)),
    wire.Computed(tuple(range(100)), True, 16),
    wire.Taken(),
    wire.Released(),
    wire.Failed("cancelled", "the client left"),
    wire.Heartbeat(),
]
STREAM = b"".join(map(wire.encode, MESSAGES))


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_messages_decode_from_any_split_of_the_stream(cuts: list[int]) -> None:
    frames, received, offsets = wire.Frames(), [], [0, *sorted(cuts), len(STREAM)]
    for start, stop in itertools.pairwise(offsets):
        received += frames.feed(STREAM[start:stop])
    assert received == MESSAGES


@given(st.integers(0, len(wire.encode(MESSAGES[0])) - 1), st.integers(1, 255))
def test_a_changed_byte_is_detected(offset: int, change: int) -> None:
    data = bytearray(wire.encode(MESSAGES[0]))
    data[offset] ^= change
    try:
        received = list(wire.Frames().feed(bytes(data)))
    except PeerLost:
        return
    assert received == [], "a larger length within the limit waits for more bytes; no wrong message is returned"
    assert offset < 4


def test_a_frame_that_is_too_long_is_refused_before_it_is_buffered() -> None:
    with pytest.raises(PeerLost, match="is longer than"):
        list(wire.Frames().feed(wire.HEAD.pack(wire.MAX_FRAME_BYTES + 1, 0)))


LONG_MODEL = msgspec.structs.replace(MEMORY, shape=msgspec.structs.replace(SHAPE, model="m" * 9000))


@pytest.mark.parametrize(
    "message",
    [
        wire.Claim(1, bytes(MAX_SECRET_BYTES + 1), None),
        wire.Claim(1, bytes(16), LONG_MODEL),
        wire.Failed("cancelled", "m" * 9000),
    ],
)
def test_a_consumer_cannot_send_long_messages(message: wire.Message) -> None:
    with pytest.raises(PeerLost):
        list(wire.Frames(wire.MAX_CLAIM_FRAME_BYTES).feed(wire.encode(message)))


@pytest.mark.parametrize("letter", ["m", "\u20ac", "\U0001f600"])
def test_every_reason_for_a_failure_fits_the_frame_of_a_consumer(letter: str) -> None:
    frames = wire.Frames(wire.MAX_CLAIM_FRAME_BYTES)
    [failed] = frames.feed(wire.encode(wire.encode_error(PeerLost(letter * 10_000))))
    assert isinstance(failed, wire.Failed)
    assert failed.message == letter * wire.MAX_REASON_CHARS


def test_an_unknown_message_is_refused() -> None:
    import zlib

    body = b"\x81\xa4type\xa5other"
    with pytest.raises(PeerLost, match="cannot be decoded"):
        list(wire.Frames().feed(wire.HEAD.pack(len(body), zlib.crc32(body)) + body))


def test_preambles_have_the_same_length() -> None:
    assert {len(wire.ROOM_PREAMBLE), len(wire.DATA_PREAMBLE)} == {wire.PREAMBLE_BYTES}


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
def test_errors_that_any_worker_would_raise_keep_their_type(error: BatonError, arrives_as: type[BatonError]) -> None:
    arrived = wire.decode_error(wire.encode_error(error))
    assert type(arrived) is arrives_as
    assert arrived.message == error.message
    assert arrived.scope == "request", "a dead peer does not end this worker"
