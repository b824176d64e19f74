"""The producer's side: accepts the connections of consumers and serves the rooms that they claim."""

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from baton.config.peer_tls import PeerTls
from baton.config.transfer import KvTransferOptions
from baton.errors import BatonError, Cancelled, ConfigError, PeerLost
from baton.ports.transfer import BlockMemory
from baton.protocol.handoff import Ticket
from baton.protocol.media import PlacedItem
from baton.protocol.outputs import KvComputed
from baton.transfer import wire
from baton.transfer.block_copy import require_alike
from baton.transfer.connection import incoming_connection
from baton.transfer.connection_limit import ConnectionSlot
from baton.transfer.listener import KvListener, Serve
from baton.transfer.rooms import Room, Rooms, RoomState
from baton.transfer.tcp import TcpServer
from baton.transfer.transports import transport_servers

log = logging.getLogger(__name__)

CLAIM_MESSAGE_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
BACKLOG = 512


async def open_room_server(
    options: KvTransferOptions,
    memory: BlockMemory | None,
    host: str,
    bootstrap_address: tuple[str, int] | None = None,
    tls: PeerTls | None = None,
) -> "RoomServer":
    """Listen on `host` for claims to blocks of `memory`, or of an engine that moves KV itself, at `bootstrap_address`.

    Raises ConfigError.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, options.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {options.port} (--kv-port): {error}") from None
    listener.setblocking(False)
    return RoomServer(options, memory, listener, bootstrap_address, tls)


class RoomServer:
    """A Producer (see `ports/transfer.py`). Event-loop thread only."""

    def __init__(
        self,
        options: KvTransferOptions,
        memory: BlockMemory | None,
        listener: socket.socket,
        bootstrap_address: tuple[str, int] | None = None,
        tls: PeerTls | None = None,
    ) -> None:
        self.rooms = Rooms(memory_s=options.claim_timeout_s)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._options = options
        self._memory = memory
        self._bootstrap_address = bootstrap_address
        self._identity = uuid.uuid4().hex
        self._servers = (
            transport_servers(options, memory, self.rooms.check, tls is not None) if memory is not None else {}
        )
        tcp = self._servers.get(TcpServer.name)
        self._tcp = tcp if isinstance(tcp, TcpServer) else None
        self._leases: dict[Room, RoomLease] = {}
        self._waiting: dict[int, list[_ClaimSession]] = {}
        self._sessions: set[_ClaimSession] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._spawn(self._forget_expired())
        serve: dict[bytes, Serve] = {wire.ROOM_PREAMBLE: self._serve_room}
        if self._tcp is not None:
            tcp_serve = self._tcp.serve
            serve[wire.DATA_PREAMBLE] = lambda connection, slot: tcp_serve(connection, slot.verify)
        self._listener = KvListener(listener, options.max_connections, serve, tls)

    @property
    def connections(self) -> int:
        """How many connections the KV port has."""
        return self._listener.limit.connections

    @property
    def open_sessions(self) -> int:
        """How many consumers are connected."""
        return len(self._sessions)

    @property
    def waiting_claims(self) -> int:
        """How many claims wait for a room that is not open yet."""
        return sum(map(len, self._waiting.values()))

    def offer(self, ticket: Ticket, prompt_tokens: int) -> "RoomLease":
        """See `Producer.offer`."""
        room = self.rooms.offer(ticket.room, ticket.secret, prompt_tokens)
        lease = self._leases[room] = RoomLease(self, room, self._options.claim_timeout_s)
        self._empty.clear()
        try:
            self._retry_claims(room.number)
        except Exception:
            self.end(room, RoomState.FAILED, PeerLost("an unexpected error at the worker that offers it; see its log"))
            raise
        return lease

    def refuse(self, ticket: Ticket, error: BatonError) -> None:
        """See `Producer.refuse`."""
        self.rooms.refuse(ticket.room, ticket.secret, error)
        self._retry_claims(ticket.room)

    async def drain(self, timeout_s: float) -> bool:
        """Wait until no room is open; return False if that takes longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """End every lease and stop listening. Idempotent."""
        for room in tuple(self._leases):
            self.end(room, RoomState.FAILED, PeerLost("the worker that offers it is shutting down"))
        for session in tuple(self._sessions):
            session.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        await self._listener.close()
        for server in self._servers.values():
            await server.close()

    def end(self, room: Room, state: RoomState, error: BatonError | None = None) -> None:
        """End a lease and notify both sides. Does nothing if it has ended."""
        if self.rooms.end(room, state, error):
            if self._tcp is not None:
                self._tcp.end_room(room.number)
            self._leases.pop(room).finish(error)
            if not self._leases:
                self._empty.set()

    def wait_for_room(self, session: "_ClaimSession", number: int) -> None:
        """Keep a claim that arrived before its prefill has started."""
        self._waiting.setdefault(number, []).append(session)

    def forget(self, session: "_ClaimSession", number: int | None) -> None:
        """Remove a session that has ended."""
        self._sessions.discard(session)
        if number is not None and session in (waiting := self._waiting.get(number, [])):
            waiting.remove(session)
            if not waiting:
                del self._waiting[number]

    def attach(self, room: Room, session: "_ClaimSession") -> wire.Accepted:
        """Connect the session to the lease of `room`; return the message that accepts its claim."""
        self._leases[room].attach(session)
        return wire.Accepted(
            self._identity, self._memory, tuple(self._servers), room.prompt_tokens, self._bootstrap_address
        )

    def open_transport(self, session: "_ClaimSession", transport: str) -> None:
        """Start a transport if need be and send its details."""
        self._spawn(self._open_transport(session, transport))

    async def _open_transport(self, session: "_ClaimSession", transport: str) -> None:
        try:
            if transport not in self._servers:
                raise PeerLost(f"there is no transport {transport!r} here")
            session.connection.send(wire.Opened(transport, await self._servers[transport].open()))
        except PeerLost as error:
            session.connection.send(wire.Opened(transport, problem=error.message))
        except Exception:  # translated for the consumer, which then tries the next transport
            log.exception("transport %s cannot be opened", transport)
            session.connection.send(wire.Opened(transport, problem="an unexpected error there; see its log"))

    def _retry_claims(self, number: int) -> None:
        for session in self._waiting.pop(number, ()):
            session.claim()

    async def _serve_room(self, connection: socket.socket, slot: ConnectionSlot) -> None:
        session = _ClaimSession(self, self._memory, self._options, slot)
        self._sessions.add(session)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: session.connection, connection)
        await session.connection.wait_closed()

    async def _forget_expired(self) -> None:
        while True:
            await asyncio.sleep(self._options.claim_timeout_s)
            self.rooms.forget_expired()

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
        self._session: _ClaimSession | None = None
        self._on_lost: Callable[[BatonError], None] | None = None
        self._end: asyncio.Future[None] = loop.create_future()
        self._timer = loop.call_later(claim_timeout_s, self._expire, claim_timeout_s)

    @property
    def claimed(self) -> bool:
        """See `Lease.claimed`."""
        return self._session is not None

    def placed(self, media: Sequence[PlacedItem]) -> None:
        """See `Lease.placed`."""
        self._room.media = tuple(media)
        if self._session is not None:
            self._session.connection.send(wire.Placed(self._room.media))

    def computed(self, output: KvComputed) -> None:
        """See `Lease.computed`."""
        room = self._room
        room.blocks.update(dict.fromkeys(output.blocks))
        room.complete = output.complete
        room.cached_tokens = output.cached_tokens
        if self._session is not None:
            self._session.connection.send(wire.Computed(output.blocks, output.complete, output.cached_tokens))

    def fail(self, error: BatonError) -> None:
        """See `Lease.fail`."""
        self._producer.end(self._room, _failed_state(error), error)

    def on_lost(self, callback: Callable[[BatonError], None]) -> None:
        """See `Lease.on_lost`."""
        self._on_lost = callback

    async def ended(self) -> None:
        """See `Lease.ended`."""
        await asyncio.shield(self._end)

    def attach(self, session: "_ClaimSession") -> None:
        """The room has been claimed."""
        self._timer.cancel()
        self._session = session

    def finish(self, error: BatonError | None) -> None:
        """The room has ended; notify both sides."""
        self._timer.cancel()
        if self._session is not None:
            self._session.finish(error)
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)
            self._end.exception()  # marks it as retrieved: `ended` may never be called
            if self._on_lost is not None:
                self._on_lost(error)

    def _expire(self, claim_timeout_s: float) -> None:
        error = PeerLost(f"no worker has claimed it within {claim_timeout_s:g} s")
        self._producer.end(self._room, RoomState.EXPIRED, error)


class _ClaimSession:
    """One connected consumer and its claim."""

    def __init__(
        self, producer: RoomServer, memory: BlockMemory | None, options: KvTransferOptions, slot: ConnectionSlot
    ) -> None:
        self.connection = incoming_connection(options.heartbeat_s, options.peer_timeout_s)
        self.connection.on_message = self._receive
        self.connection.on_lost = self._lost
        self._producer = producer
        self._memory = memory
        self._slot = slot
        self._claim_timeout_s = options.claim_timeout_s
        self._claim: wire.Claim | None = None
        self._room: Room | None = None
        self._unusable: Room | None = None  # the room of a claim whose memory is not compatible
        self._timer = self._refuse_after(CLAIM_MESSAGE_TIMEOUT_S, "no claim was received")

    def claim(self) -> None:
        """Claim the room, or try again; wait if it is not open yet. Only a peer with the secret learns a KV shape."""
        assert self._claim is not None
        rooms, number, secret = self._producer.rooms, self._claim.room, self._claim.secret
        try:
            offered = rooms.find_offered(number, secret)
            if offered is None:
                self._producer.wait_for_room(self, number)
                return
            if not self._fits(offered):
                return
            self._room = rooms.claim(number, secret)
        except BatonError as error:
            self._refuse(error)
            return
        assert self._room is not None
        self._slot.verify()
        self._timer.cancel()
        room = self._room
        self.connection.send(self._producer.attach(room, self))
        if room.media is not None:
            self.connection.send(wire.Placed(room.media))
        if room.blocks:
            self.connection.send(wire.Computed(tuple(room.blocks), room.complete, room.cached_tokens))

    def _fits(self, offered: Room) -> bool:
        """Whether the consumer's memory is compatible; else send the difference.

        The connection stays open for a moment: a consumer that declines sends the reason right after its claim.
        """
        assert self._claim is not None
        try:
            require_alike(self._memory, self._claim.memory)
        except PeerLost as error:
            self._unusable = offered
            self.connection.send(wire.encode_error(error))
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(CLAIM_MESSAGE_TIMEOUT_S, self.close)
        return self._unusable is None

    def finish(self, error: BatonError | None) -> None:
        """The lease has ended; send the result and close the connection."""
        self.connection.send(wire.Released() if error is None else wire.encode_error(error))
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._timer.cancel()
        self.connection.close()
        self._producer.forget(self, self._claim.room if self._claim else None)

    def _receive(self, message: wire.Message) -> None:
        match message:
            case wire.Claim() if self._claim is None:
                self._claim = message
                self._timer.cancel()
                self._timer = self._refuse_after(self._claim_timeout_s, "the prefill has not begun")
                self.claim()
            case wire.Open() if self._room is not None:
                self._producer.open_transport(self, message.transport)
            case wire.Taken() if self._room is not None and (self._room.complete or self._memory is None):
                self._producer.end(self._room, RoomState.DONE)
            case wire.Failed() if self._claim is not None:
                self._withdraw(wire.decode_error(message))
            case _:
                self._refuse(PeerLost(f"unexpected message {type(message).__name__}"))

    def _withdraw(self, error: BatonError) -> None:
        """The consumer has given up its claim, or has failed."""
        assert self._claim is not None
        if self._room is not None:
            self._producer.end(self._room, _failed_state(error), error)
        else:
            if isinstance(error, Cancelled):
                self._decline(error)
            self.close()

    def _decline(self, error: Cancelled) -> None:
        assert self._claim is not None
        if self._unusable is None:
            self._producer.rooms.decline(self._claim.room, self._claim.secret)
        elif self._unusable.state is RoomState.OFFERED:
            self._producer.end(self._unusable, RoomState.CANCELLED, error)

    def _refuse(self, error: BatonError) -> None:
        if self._room is not None:
            self._producer.end(self._room, RoomState.FAILED, error)
        else:
            self.finish(error)

    def _refuse_after(self, timeout_s: float, problem: str) -> asyncio.TimerHandle:
        error = PeerLost(f"{problem} within {timeout_s:g} s")
        return asyncio.get_running_loop().call_later(timeout_s, self._refuse, error)

    def _lost(self, error: PeerLost) -> None:
        if self._room is not None:
            self._producer.end(self._room, RoomState.FAILED, error)
        self.close()


def _failed_state(error: BatonError) -> RoomState:
    return RoomState.CANCELLED if isinstance(error, Cancelled) else RoomState.FAILED
