"""The transport over any network: the consumer requests blocks, the producer sends them, from one cache to the other.

consumer                      producer
Request ─────────────────────►         length, then room, secret and block numbers
        ◄───────────────────── head    bytes of the reason for a refusal, bytes of KV
        ◄───────────────────── reason, or the KV: plane by plane, in the order of the request
        ◄───────────────────── crc32   of head and KV, if the request asks for it

KV of a GPU goes through pinned memory of its host (`device_copy.py`). The other side may be of either kind.
"""

import asyncio
import logging
import socket
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

import msgspec
import numpy as np

from baton.config.peer_tls import PeerTls
from baton.errors import PeerLost
from baton.ports.transfer import BlockMemory, Channel, Check
from baton.protocol.handoff import Room, Ticket
from baton.transfer.block_copy import (
    Numbers,
    block_numbers,
    block_pairs,
    require_alike,
    require_host,
    require_sound,
    spans,
)
from baton.transfer.device_copy import Staging
from baton.transfer.sockets import (
    Checksum,
    Pump,
    array_span,
    configure,
    join_spans,
    receive_bytes,
    receive_some,
    receive_spans,
    send_bytes,
    sending,
    shut_down,
)
from baton.transfer.tls import connect_to
from baton.transfer.wire import DATA_PREAMBLE

log = logging.getLogger(__name__)

REQUEST_HEAD = struct.Struct("<I")
ANSWER_HEAD = struct.Struct("<IQ")
CHECKSUM = struct.Struct("<I")
MAX_PROOF_BYTES = 4096  # of a request without blocks
REASON_BYTES = 1000
SMALL_BYTES = 64 << 10


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A request for blocks of a room. Block numbers are four bytes each, little-endian."""

    room: Room
    secret: bytes
    blocks: bytes
    checksum: bool


class TcpDetails(msgspec.Struct, frozen=True):
    """What a consumer needs to connect."""

    checksum: bool = False


class Answering:
    """The blocks of one request on their way, in one part or several."""

    def __init__(self) -> None:
        self._pump: Pump | None = None
        self._error: PeerLost | None = None

    async def send(self, pump: Pump, stall_timeout_s: float) -> None:
        """Send one part. Raises PeerLost, also if it was stopped before."""
        if self._error is not None:
            raise self._error
        self._pump = pump
        await pump.run(stall_timeout_s)

    def stop(self, error: PeerLost) -> None:
        """End with `error`; after return nothing is sent."""
        self._error = error
        if self._pump is not None:
            self._pump.stop(error)


class TcpServer:
    """Sends blocks of `memory` to consumers, on connections that it is given. Event-loop thread only.

    Memory of a GPU needs `staging`, which is closed with this.
    """

    name = "tcp"

    def __init__(
        self,
        memory: BlockMemory,
        check: Check,
        checksum: bool = False,
        stall_timeout_s: float = 5.0,
        staging: Staging | None = None,
    ) -> None:
        self._memory = memory
        self._staging = staging
        self._check = check
        self._checksum = checksum
        self._stall_timeout_s = stall_timeout_s
        self._serving: dict[socket.socket, asyncio.Future[None]] = {}
        self._sending: dict[int, set[Answering]] = {}  # by room
        self._closed = False

    async def open(self) -> dict[str, object]:
        """Return whether checksums are required. Raises PeerLost for a cache that the CPU cannot read."""
        self._require_readable()
        return {"checksum": self._checksum}

    async def close(self) -> None:
        """End every connection; after return no memory is read."""
        self._closed = True
        for connection in self._serving:
            shut_down(connection)
        await asyncio.gather(*self._serving.values())
        if self._staging is not None:
            await self._staging.close()

    def end_room(self, room: int) -> None:
        """Stop sending blocks of `room`, which others may write next; after return what they hold is not sent."""
        for answering in self._sending.get(room, ()):
            answering.stop(PeerLost(f"room {room} has ended"))

    async def serve(self, connection: socket.socket, on_verified: Callable[[], None]) -> None:
        """Answer the requests on `connection` until the peer disconnects or stalls, then close it.

        It is non-blocking, and its preamble has been read. The first request must arrive within the stall timeout and
        be short: it proves that the consumer has a secret. Then `on_verified` is called.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._serving[connection] = ended
        try:
            if self._closed:
                return
            configure(connection)
            await self._answer(connection, await self._request(connection, self._stall_timeout_s, MAX_PROOF_BYTES))
            on_verified()
            limit = MAX_PROOF_BYTES + 4 * self._memory.blocks
            while True:
                await self._answer(connection, await self._request(connection, None, limit))
        except (PeerLost, OSError) as error:
            log.debug("a consumer disconnected: %s", error)
        finally:
            connection.close()
            del self._serving[connection]
            ended.set_result(None)

    async def _request(self, connection: socket.socket, timeout_s: float | None, max_bytes: int) -> Request:
        """Return the next request; once begun, it must be complete within the stall timeout. Raises PeerLost."""
        data = await receive_some(connection, SMALL_BYTES, timeout_s)
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                while len(data) < REQUEST_HEAD.size or len(data) < _request_bytes(data, max_bytes):
                    data += await receive_some(connection, SMALL_BYTES, None)
            return msgspec.msgpack.decode(data[REQUEST_HEAD.size :], type=Request)
        except TimeoutError:
            raise PeerLost("a request is incomplete") from None
        except msgspec.MsgspecError as error:
            raise PeerLost(f"a request cannot be decoded: {error}") from None

    async def _answer(self, connection: socket.socket, request: Request) -> None:
        """Send the requested blocks, or the reason for a refusal. Raises PeerLost, also after a refusal."""
        try:
            blocks = self._requested_blocks(request)
        except PeerLost as error:
            reason = (error.message or "refused").encode()[:REASON_BYTES]
            await send_bytes(connection, ANSWER_HEAD.pack(len(reason), 0) + reason, self._stall_timeout_s)
            raise
        checksum = Checksum() if request.checksum else None
        answering = Answering()
        others = self._sending.setdefault(request.room, set())
        others.add(answering)
        try:
            await self._send_blocks(connection, blocks, answering, checksum)
        finally:
            others.discard(answering)
            if not others:
                self._sending.pop(request.room, None)
        if checksum is not None:
            await send_bytes(connection, CHECKSUM.pack(checksum.value), self._stall_timeout_s)

    async def _send_blocks(
        self, connection: socket.socket, blocks: Numbers, answering: Answering, checksum: Checksum | None
    ) -> None:
        """Send the head and the blocks unless their room ends meanwhile. Raises PeerLost."""
        nbytes = len(blocks) * self._memory.planes * self._memory.block_bytes
        head = np.frombuffer(ANSWER_HEAD.pack(0, nbytes), np.uint8)
        unsent = array_span(head)
        if self._staging is None or not len(blocks):
            every = join_spans(unsent, spans(self._memory, blocks))
            await answering.send(sending(connection, every, checksum), self._stall_timeout_s)
            return
        async with aclosing(self._staging.read(blocks)) as parts:
            async for part in parts:
                await answering.send(sending(connection, join_spans(unsent, part), checksum), self._stall_timeout_s)
                unsent = array_span(head[:0])

    def _requested_blocks(self, request: Request) -> Numbers:
        """Return the numbers of the requested blocks. Raises PeerLost unless the room offers them to this consumer."""
        if len(request.blocks) % 4:
            raise PeerLost("invalid block numbers")
        blocks = np.frombuffer(request.blocks, "<u4").astype(np.int64)
        self._check(request.room, request.secret, blocks.tolist())
        self._require_readable()
        return block_numbers(self._memory, blocks)

    def _require_readable(self) -> None:
        if self._staging is None:
            require_host(self._memory, self.name)


def _request_bytes(data: bytes, max_bytes: int) -> int:
    """Return the length of a request whose head is complete. Raises PeerLost if it is too long."""
    (length,) = REQUEST_HEAD.unpack_from(data)
    if length > max_bytes:
        raise PeerLost(f"a request of {length} bytes is longer than {max_bytes}")
    return REQUEST_HEAD.size + int(length)


class TcpClient:
    """Fetches KV from producers on any host. Event-loop thread only.

    Memory of a GPU needs `staging`, which is closed with this.
    """

    name = "tcp"

    def __init__(
        self,
        mine: BlockMemory,
        checksum: bool = False,
        connect_timeout_s: float = 3.0,
        stall_timeout_s: float = 5.0,
        tls: PeerTls | None = None,
        staging: Staging | None = None,
    ) -> None:
        self._mine = mine
        self._checksum = checksum
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._tls = tls
        self._staging = staging

    async def connect(self, ticket: Ticket, memory: BlockMemory, details: dict[str, object]) -> Channel:
        """Connect to the ticket's address and prove its secret. Raises PeerLost."""
        if self._staging is None:
            require_host(self._mine, self.name)
        require_sound(memory, memory.nbytes)
        require_alike(self._mine, memory)
        try:
            required = msgspec.convert(details, TcpDetails).checksum
        except msgspec.MsgspecError as error:
            raise PeerLost(f"the producer sent invalid transport details: {error}") from None
        channel = TcpChannel(
            self._mine,
            memory,
            self._checksum or required,
            self._connect_timeout_s,
            self._stall_timeout_s,
            self._tls,
            self._staging,
        )
        await channel.open(ticket)
        return channel

    async def close(self) -> None:
        """Free the staging buffers; channels hold the connections."""
        if self._staging is not None:
            await self._staging.close()


class TcpChannel:
    """A connection to one producer, established again after a failed fetch. Fetches run one at a time."""

    def __init__(
        self,
        mine: BlockMemory,
        theirs: BlockMemory,
        checksum: bool,
        connect_timeout_s: float,
        stall_timeout_s: float,
        tls: PeerTls | None = None,
        staging: Staging | None = None,
    ) -> None:
        self._staging = staging
        self._mine = mine
        self._theirs = theirs
        self._checksum = checksum
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._tls = tls
        self._lock = asyncio.Lock()
        self._connection: socket.socket | None = None
        self._closed = False

    async def open(self, ticket: Ticket) -> None:
        """Connect and prove the ticket's secret. Raises PeerLost."""
        async with self._one_at_a_time():
            await self._connected(ticket)

    async def fetch(self, ticket: Ticket, theirs: Sequence[int], mine: Sequence[int]) -> None:
        """Request the blocks and receive them in place. Bytes are written only while this runs."""
        source, target = block_pairs(self._theirs, theirs, self._mine, mine)
        async with self._one_at_a_time():
            await self._request_blocks(await self._connected(ticket), ticket, source, target)

    def close(self) -> None:
        """Close the connection; a fetch that is running ends with PeerLost and closes it then.

        It watches the descriptor until it ends, so that this must not become the descriptor of another connection.
        """
        self._closed = True
        if self._lock.locked() and self._connection is not None:
            shut_down(self._connection)
        else:
            self._drop()

    @asynccontextmanager
    async def _one_at_a_time(self) -> AsyncIterator[None]:
        """After an error the state of the connection is not known: it is closed."""
        async with self._lock:
            try:
                yield
            except BaseException:
                self._drop()
                raise

    async def _connected(self, ticket: Ticket) -> socket.socket:
        """Return the connection, established if need be: it begins with a request without blocks. Raises PeerLost."""
        if self._connection is None and not self._closed:
            self._connection = await connect_to(ticket.host, ticket.port, self._connect_timeout_s, self._tls)
            await send_bytes(self._connection, DATA_PREAMBLE, self._stall_timeout_s)
            nothing: Numbers = np.empty(0, np.int64)
            await self._request_blocks(self._connection, ticket, nothing, nothing)
        if self._connection is None or self._closed:
            raise PeerLost("the channel to the producer is closed")
        return self._connection

    async def _request_blocks(
        self, connection: socket.socket, ticket: Ticket, source: Numbers, target: Numbers
    ) -> None:
        blocks = source.astype("<u4").tobytes()
        request = msgspec.msgpack.encode(Request(ticket.room, ticket.secret, blocks, self._checksum))
        await send_bytes(connection, REQUEST_HEAD.pack(len(request)) + request, self._stall_timeout_s)
        head = await receive_bytes(connection, ANSWER_HEAD.size, self._stall_timeout_s)
        reason_bytes, nbytes = ANSWER_HEAD.unpack(head)
        if reason_bytes:
            reason = await receive_bytes(connection, min(reason_bytes, REASON_BYTES), self._stall_timeout_s)
            raise PeerLost(reason.decode(errors="replace"))
        wanted = len(target) * self._mine.planes * self._mine.block_bytes
        if nbytes != wanted:
            raise PeerLost(f"the producer sends {nbytes} bytes instead of {wanted}")
        checksum = Checksum(zlib.crc32(head)) if self._checksum else None
        await self._receive_blocks(connection, target, checksum)
        if checksum is None:
            return
        if CHECKSUM.unpack(await receive_bytes(connection, CHECKSUM.size, self._stall_timeout_s)) != (checksum.value,):
            raise PeerLost("the KV was corrupted in transit: its checksum is wrong")

    async def _receive_blocks(self, connection: socket.socket, target: Numbers, checksum: Checksum | None) -> None:
        if self._staging is None:
            await receive_spans(connection, spans(self._mine, target), self._stall_timeout_s, checksum)
            return
        async with aclosing(self._staging.write(target)) as parts:
            async for part in parts:
                await receive_spans(connection, part, self._stall_timeout_s, checksum)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
