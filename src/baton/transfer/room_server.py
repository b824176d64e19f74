"""The prefill side: rooms that others come to, and what they are told there."""

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from baton.config.transfer import KvTransferOptions, chosen_transports
from baton.errors import BatonError, Cancelled, ConfigError, PeerLost
from baton.ports.transfer import KvMemory, TransportServer
from baton.protocol.handoff import Ticket
from baton.protocol.outputs import KvComputed
from baton.transfer import nixl, wire
from baton.transfer.block_copy import require_alike
from baton.transfer.connection import RoomConnection
from baton.transfer.rooms import Room, Rooms, RoomState
from baton.transfer.shm import ShmServer
from baton.transfer.tcp import TcpServer
from baton.transfer.wire import failed, failure

log = logging.getLogger(__name__)

GREETING_S = 5.0
BACKLOG = 512


async def open_room_server(
    options: KvTransferOptions, memory: KvMemory | None, host: str, meeting: tuple[str, int] | None = None
) -> "RoomServer":
    """Listen on `host` for those who come for KV of `memory`, or of an engine that moves it by itself at `meeting`.

    Raises ConfigError.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, options.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {options.port} (--kv-port): {error}") from None
    listener.setblocking(False)
    return RoomServer(options, memory, listener, meeting)


class RoomServer:
    """A Producer (see `ports/transfer.py`). Event-loop thread only."""

    def __init__(
        self,
        options: KvTransferOptions,
        memory: KvMemory | None,
        listener: socket.socket,
        meeting: tuple[str, int] | None = None,
    ) -> None:
        self.rooms = Rooms(memory_s=options.claim_timeout_s)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._options = options
        self._memory = memory
        self._meeting = meeting
        self._listener = listener
        self._name = uuid.uuid4().hex
        self._data = TcpServer(memory, self.rooms.check, options.checksum) if memory is not None else None
        self._sources = {source.name: source for source in _sources(options, memory, self.rooms, self._data)}
        self._leases: dict[Room, RoomLease] = {}
        self._waiting: dict[int, list[_ClaimSession]] = {}
        self._visits: set[_ClaimSession] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._spawn(self._accept())

    def offer(self, ticket: Ticket, prompt_tokens: int) -> "RoomLease":
        """See `Lender.lend`."""
        room = self.rooms.offer(ticket.room, ticket.secret, prompt_tokens)
        lease = self._leases[room] = RoomLease(self, room, self._options.claim_timeout_s)
        self._empty.clear()
        for visit in self._waiting.pop(room.number, ()):
            visit.claim()
        return lease

    def refuse(self, ticket: Ticket, error: BatonError) -> None:
        """See `Lender.refuse`."""
        room = self.rooms.find(ticket.room, ticket.secret)
        if room is not None:
            self.end(room, RoomState.FAILED, error)
            return
        self.rooms.refuse(ticket.room, ticket.secret, error)
        for visit in self._waiting.pop(ticket.room, ()):
            visit.claim()

    async def drain(self, timeout_s: float) -> bool:
        """Wait until no room is open; return False if that takes longer than `timeout_s`."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """End every lease and stop listening. Idempotent."""
        for room in tuple(self._leases):
            self.end(room, RoomState.FAILED, PeerLost("the prefill worker is shutting down"))
        for visit in tuple(self._visits):
            visit.leave()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GREETING_S)
        self._listener.close()
        for source in self._sources.values():
            await source.close()

    def end(self, room: Room, state: RoomState, error: BatonError | None = None) -> None:
        """End a lease in whatever way; both sides are told. Does nothing if it has ended."""
        if self.rooms.end(room, state, error):
            self._leases.pop(room).finish(error)
            if not self._leases:
                self._empty.set()

    def wait_for_room(self, visit: "_ClaimSession", number: int) -> None:
        """Somebody has come before the prefill has begun."""
        self._waiting.setdefault(number, []).append(visit)

    def forget(self, visit: "_ClaimSession", number: int | None) -> None:
        """A visit has ended."""
        self._visits.discard(visit)
        if number is not None and visit in (waiting := self._waiting.get(number, [])):
            waiting.remove(visit)
            if not waiting:
                del self._waiting[number]

    def attach(self, room: Room, visit: "_ClaimSession") -> wire.Accepted:
        """Tell the holder of `room` from now on what becomes of it; return the first thing to tell."""
        self._leases[room].attach(visit)
        return wire.Accepted(self._name, self._memory, tuple(self._sources), room.prompt_tokens, self._meeting)

    def open_transport(self, visit: "_ClaimSession", transport: str) -> None:
        """Prepare a way to read our memory and tell the visitor about it."""
        self._spawn(self._open_transport(visit, transport))

    async def _open_transport(self, visit: "_ClaimSession", transport: str) -> None:
        try:
            if transport not in self._sources:
                raise PeerLost(f"there is no way {transport!r} here")
            visit.line.send(wire.Opened(transport, await self._sources[transport].open()))
        except PeerLost as error:
            visit.line.send(wire.Opened(transport, problem=error.message))

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # too many open files, mostly: others may leave
                log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            self._spawn(self._greet(connection))

    async def _greet(self, connection: socket.socket) -> None:
        """Find out what a connection is for."""
        loop = asyncio.get_running_loop()
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(GREETING_S):
                preamble = await _read(loop, connection, wire.PREAMBLE_BYTES)
        except (OSError, PeerLost, asyncio.CancelledError):  # TimeoutError is an OSError
            connection.close()
            return
        if preamble == wire.DATA and self._data is not None and self._data.name in self._sources:
            await self._data.serve(connection)
        elif preamble == wire.LINE:
            visit = _ClaimSession(self, self._memory, self._options)
            self._visits.add(visit)
            await loop.connect_accepted_socket(lambda: visit.line, connection)
        else:
            connection.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class RoomLease:
    """See `Lease`."""

    def __init__(self, producer: RoomServer, room: Room, claim_timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._producer = producer
        self._room = room
        self._visit: _ClaimSession | None = None
        self._on_lost: Callable[[BatonError], None] | None = None
        self._end: asyncio.Future[None] = loop.create_future()
        self._timer = loop.call_later(claim_timeout_s, self._expire, claim_timeout_s)

    def computed(self, output: KvComputed) -> None:
        """See `Lease.computed`."""
        room = self._room
        room.blocks.update(dict.fromkeys(output.blocks))
        room.complete = output.complete
        room.cached_tokens = output.cached_tokens
        if self._visit is not None:
            self._visit.line.send(wire.Computed(output.blocks, output.complete, output.cached_tokens))

    def fail(self, error: BatonError) -> None:
        """See `Lease.fail`."""
        state = RoomState.CANCELLED if isinstance(error, Cancelled) else RoomState.FAILED
        self._producer.end(self._room, state, error)

    def on_lost(self, callback: Callable[[BatonError], None]) -> None:
        """See `Lease.on_lost`."""
        self._on_lost = callback

    async def ended(self) -> None:
        """See `Lease.ended`."""
        await asyncio.shield(self._end)

    def attach(self, visit: "_ClaimSession") -> None:
        """Somebody has claimed it."""
        self._timer.cancel()
        self._visit = visit

    def finish(self, error: BatonError | None) -> None:
        """It has ended; tell both sides."""
        self._timer.cancel()
        if self._visit is not None:
            self._visit.finish(error)
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)
            self._end.exception()  # marked as read: nobody may be waiting
            if self._on_lost is not None:
                self._on_lost(error)

    def _expire(self, claim_timeout_s: float) -> None:
        self._producer.end(
            self._room, RoomState.EXPIRED, PeerLost(f"nobody has come for the KV within {claim_timeout_s:g} s")
        )


class _ClaimSession:
    """Somebody on the line."""

    def __init__(self, producer: RoomServer, memory: KvMemory | None, options: KvTransferOptions) -> None:
        self.line = RoomConnection(options.heartbeat_s, options.peer_timeout_s)
        self.line.on_message = self._hear
        self.line.on_lost = self._lost
        self._producer = producer
        self._memory = memory
        self._claim_s = options.claim_timeout_s
        self._claim: wire.Claim | None = None
        self._room: Room | None = None
        self._timer = asyncio.get_running_loop().call_later(GREETING_S, self._refuse, PeerLost("no claim has come"))

    def claim(self) -> None:
        """Ask for the room, or ask again; wait if it is not there yet."""
        assert self._claim is not None
        try:
            require_alike(self._memory, self._claim.memory)
            self._room = self._producer.rooms.claim(self._claim.room, self._claim.secret)
        except BatonError as error:
            self._refuse(error)
            return
        if self._room is None:
            self._producer.wait_for_room(self, self._claim.room)
            return
        self._timer.cancel()
        room = self._room
        self.line.send(self._producer.attach(room, self))
        if room.blocks:
            self.line.send(wire.Computed(tuple(room.blocks), room.complete, room.cached_tokens))

    def finish(self, error: BatonError | None) -> None:
        """The lease has ended; say so and hang up."""
        self.line.send(wire.Released() if error is None else failed(error))
        self.leave()

    def leave(self) -> None:
        """Hang up."""
        self._timer.cancel()
        self.line.close()
        self._producer.forget(self, self._claim.room if self._claim else None)

    def _hear(self, message: wire.Message) -> None:
        match message:
            case wire.Claim() if self._claim is None:
                self._claim = message
                self._timer.cancel()
                late = PeerLost(f"the prefill has not begun within {self._claim_s:g} s")
                self._timer = asyncio.get_running_loop().call_later(self._claim_s, self._refuse, late)
                self.claim()
            case wire.Open() if self._room is not None:
                self._producer.open_transport(self, message.transport)
            case wire.Taken() if self._room is not None and (self._room.complete or self._memory is None):
                self._producer.end(self._room, RoomState.DONE)
            case wire.Failed() if self._claim is not None:
                self._regret(failure(message))
            case _:
                self._refuse(PeerLost(f"{type(message).__name__} was not expected"))

    def _regret(self, error: BatonError) -> None:
        """The other side does not want it any more, or cannot go on."""
        assert self._claim is not None
        if self._room is not None:
            state = RoomState.CANCELLED if isinstance(error, Cancelled) else RoomState.FAILED
            self._producer.end(self._room, state, error)
        else:
            self._producer.rooms.refuse(self._claim.room, self._claim.secret, error)
            self.leave()

    def _refuse(self, error: BatonError) -> None:
        if self._room is not None:
            self._producer.end(self._room, RoomState.FAILED, error)
        else:
            self.finish(error)

    def _lost(self, error: PeerLost) -> None:
        if self._room is not None:
            self._producer.end(self._room, RoomState.FAILED, error)
        self.leave()


def _sources(
    options: KvTransferOptions, memory: KvMemory | None, rooms: Rooms, data: TcpServer | None
) -> Sequence[TransportServer]:
    """Return the ways in which our memory can be read, best first."""
    sources: list[TransportServer] = []
    if memory is None or data is None:
        return sources
    for transport in chosen_transports(options):
        if transport == "shm" and memory.descriptor is not None:
            sources.append(ShmServer(memory, rooms.check))
        elif transport == "nixl" and nixl.available():
            sources.append(nixl.NixlServer(memory))
        elif transport == "tcp" and memory.device == "cpu":
            sources.append(data)
    if not sources:
        raise ConfigError(f"none of the ways {options.transports} (--kv-transports) works here")
    return sources


async def _read(loop: asyncio.AbstractEventLoop, connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await loop.sock_recv(connection, count - len(data))
        if not part:
            raise PeerLost("hung up")
        data += part
    return data
