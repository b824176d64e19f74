"""Messages between the two sides of a room, and their encoding.

A connection begins with a preamble that states its purpose. On a room connection, frames follow: four bytes of length,
four of checksum, then a tagged message. A frame that is too long, corrupt or unknown ends the connection.

    consumer                     producer
    Claim  ────────────────────►           room and secret, and the layout of the consumer's KV cache
           ◄──────────────────── Accepted  the layout of the producer's, and its transports, best first
    Open   ────────────────────►           once for each pair of workers: details of this transport?
           ◄──────────────────── Opened
           ◄──────────────────── Placed    the encoded media of a prompt that has any
           ◄──────────────────── Computed  further blocks can be read, as they are computed; the last one is complete
    Taken  ────────────────────►           everything has been read
           ◄──────────────────── Released  it was still held while it was read: only now it may be used
    Failed ◄───────────────────► Failed    from either side: the room has ended, and why
    Heartbeat ◄────────────────► Heartbeat periodically, from both

Rows of encoded media are read in the same way: the blocks are those of an embedding store.

Engines that move KV themselves show no memory. Accepted then carries the engine's bootstrap address, and Taken confirms
that the engines have moved the KV.
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
from baton.ports.transfer import BlockMemory
from baton.protocol.handoff import Room, Secret
from baton.protocol.media import PlacedItem

ROOM_PREAMBLE = b"BatonKV2.room..."
DATA_PREAMBLE = b"BatonKV2.data..."
PREAMBLE_BYTES = 16
HEAD = struct.Struct("<II")
MAX_FRAME_BYTES = 4 << 20
MAX_CLAIM_FRAME_BYTES = 8 << 10  # what a consumer sends: anybody may, before a secret is checked
MAX_REASON_CHARS = 1000


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    """The sender has the ticket of this room."""

    room: Room
    secret: Secret
    memory: BlockMemory | None


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The claim is accepted. `producer` identifies the producer's process: it changes with every start."""

    producer: str
    memory: BlockMemory | None
    transports: tuple[str, ...]
    prompt_tokens: int
    bootstrap_address: tuple[str, int] | None = None


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Request the details of a transport."""

    transport: str


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The details of a transport, or the problem why it cannot be used."""

    transport: str
    details: dict[str, object] | None = None
    problem: str = ""


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    """The encoded media of the prompt, and their places in it."""

    media: tuple[PlacedItem, ...]


class Computed(msgspec.Struct, frozen=True, tag="computed"):
    """Further blocks of the prompt can be read, in prompt order."""

    blocks: tuple[int, ...]
    complete: bool
    cached_tokens: int


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The consumer has read all blocks that it wants."""


class Released(msgspec.Struct, frozen=True, tag="released"):
    """The KV was held until Taken arrived, and is no longer held."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The room has ended. `code` is a code of `errors.py`."""

    code: str
    message: str


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The sender is alive."""


Message = Claim | Accepted | Open | Opened | Placed | Computed | Taken | Released | Failed | Heartbeat

# Any worker would fail with these. Every other failure is local to the other worker, and a reason to retry elsewhere.
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
    """Splits a byte stream into messages."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that `data` completes. Raises PeerLost for an invalid frame."""
        self._pending += data
        while len(self._pending) >= HEAD.size:
            length, checksum = HEAD.unpack_from(self._pending)
            if length > self._max_frame_bytes:
                raise PeerLost(f"a frame of {length} bytes is longer than {self._max_frame_bytes}")
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
        raise PeerLost(f"a frame cannot be decoded: {error}") from None


def encode_error(error: BatonError) -> Failed:
    """Return the message that carries `error` to the other side."""
    return Failed(error.code, error.message[:MAX_REASON_CHARS])


def decode_error(message: Failed) -> BatonError:
    """Return the other side's failure as an error of this worker's request."""
    return _SAME_EVERYWHERE.get(message.code, PeerLost)(message.message)
