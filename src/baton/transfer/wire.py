"""What is said between the two sides of a room, as bytes.

A connection begins with a preamble that says what it is for; everything after it on a line is frames: four bytes of
length, four of checksum, then a tagged message. A frame that is too long, corrupt or unknown ends the connection.

    borrower                     lender
    Claim  ────────────────────►          room and secret, and what the borrower's cache looks like
           ◄──────────────────── Accepted what the lender's looks like, and the ways to read it, best first
    Open   ────────────────────►          once for each pair: how can your memory be read that way?
           ◄──────────────────── Opened
           ◄──────────────────── Computed further blocks can be read, as they are computed; the last one is complete
    Taken  ────────────────────►          everything has been read
           ◄──────────────────── Released ... while it was still held: only now it may be used
    Failed ◄───────────────────► Failed   from either side: it is over, and why
    Beat   ◄───────────────────► Beat     every so often, from both

Where the engines move KV by themselves, neither side has a memory to show. Accepted says where the engines meet, and
Taken that they have met.
"""

import struct
import zlib
from collections.abc import Iterator

import msgspec

from baton.errors import (
    BatonError,
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    PeerLost,
    Unsupported,
)
from baton.ports.transfer import KvMemory
from baton.protocol.handoff import Room

LINE = b"BatonKV1.line..."
DATA = b"BatonKV1.data..."
PREAMBLE_BYTES = 16
HEAD = struct.Struct("<II")
MAX_FRAME_BYTES = 4 << 20


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    """I have the ticket of this room."""

    room: Room
    secret: bytes
    memory: KvMemory | None


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The room is yours. `lender` is the name of this run of the lender's process."""

    producer: str
    memory: KvMemory | None
    transports: tuple[str, ...]
    prompt_tokens: int
    meeting: tuple[str, int] | None = None


class Open(msgspec.Struct, frozen=True, tag="open"):
    """How can your memory be read that way?"""

    transport: str


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """Like this; or not at all, and why."""

    transport: str
    details: dict[str, object] | None = None
    problem: str = ""


class Computed(msgspec.Struct, frozen=True, tag="computed"):
    """Further blocks of the prompt can be read, in its order."""

    blocks: tuple[int, ...]
    complete: bool
    cached_tokens: int


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """All that I want has been read."""


class Released(msgspec.Struct, frozen=True, tag="released"):
    """It was still there when you had read it, and is no longer held."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It is over. `code` is of `errors.py`."""

    code: str
    message: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """I am still here."""


Message = Claim | Accepted | Open | Opened | Computed | Taken | Released | Failed | Beat

# Another worker would fail with these too. Anything else is the other worker's trouble, and a reason to try elsewhere.
_SAME_EVERYWHERE = {
    error.code: error
    for error in (InvalidRequest, ContextTooLong, Unsupported, Cancelled, DeadlineExceeded, EngineFailed)
}

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return `message` as a frame."""
    body = _encoder.encode(message)
    return HEAD.pack(len(body), zlib.crc32(body)) + body


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that `data` completes. Raises PeerLost at bytes that are none."""
        self._pending += data
        while len(self._pending) >= HEAD.size:
            length, checksum = HEAD.unpack_from(self._pending)
            if length > MAX_FRAME_BYTES:
                raise PeerLost(f"a frame of {length} bytes is longer than any may be")
            if len(self._pending) < HEAD.size + length:
                break
            body = bytes(self._pending[HEAD.size : HEAD.size + length])
            del self._pending[: HEAD.size + length]
            yield _decode(body, checksum)


def _decode(body: bytes, checksum: int) -> Message:
    if zlib.crc32(body) != checksum:
        raise PeerLost("a frame is corrupt")
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise PeerLost(f"a frame cannot be read: {error}") from None


def failed(error: BatonError) -> Failed:
    """Return the message that tells the other side of `error`."""
    return Failed(error.code, error.message)


def failure(message: Failed) -> BatonError:
    """Return what the other side failed with, as an error of this worker's request."""
    return _SAME_EVERYWHERE.get(message.code, PeerLost)(message.message)
