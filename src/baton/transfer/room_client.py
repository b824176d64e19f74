"""The consumer's side: claims rooms of other workers and fetches their blocks while they are computed."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from baton.config.peer_tls import PeerTls
from baton.config.transfer import KvTransferOptions
from baton.errors import BatonError, Cancelled, PeerLost
from baton.metrics.families import SECONDS, Distribution
from baton.ports.transfer import BlockMemory, Channel, TransportClient
from baton.protocol.handoff import Ticket
from baton.protocol.media import PlacedItem
from baton.protocol.outputs import KvWanted
from baton.transfer import wire
from baton.transfer.block_copy import require_alike
from baton.transfer.connection import RoomConnection, outgoing_connection
from baton.transfer.producer_peer import ProducerPeer
from baton.transfer.tls import connect_to
from baton.transfer.transports import transport_clients

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 10.0
IDLE_PEER_S = 600.0
GIVEN_UP = Cancelled("the other worker has given up its claim")

T = TypeVar("T")


def open_room_client(
    options: KvTransferOptions, memory: BlockMemory | None, tls: PeerTls | None = None
) -> "RoomClient":
    """Return a client that fetches blocks into `memory`, or only claims it for an engine that fetches KV itself.

    Raises ConfigError.
    """
    return RoomClient(options, memory, transport_clients(options, memory, tls) if memory is not None else (), tls)


class RoomClient:
    """A Consumer (see `ports/transfer.py`). Event-loop thread only."""

    def __init__(
        self,
        options: KvTransferOptions,
        memory: BlockMemory | None,
        transports: Sequence[TransportClient],
        tls: PeerTls | None = None,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self.options = options
        self.answer_timeout_s = answer_timeout_s
        self._tls = tls
        self.memory = memory
        self.bytes_by_transport: defaultdict[str, float] = defaultdict(float)
        self.seconds_by_transport: defaultdict[str, Distribution] = defaultdict(lambda: Distribution(SECONDS))
        self._transports = transports
        self._peers: dict[str, ProducerPeer] = {}  # by identity of the producer's process
        self._producers: dict[tuple[str, int], str] = {}  # the process that was last seen at an address
        self._claims: set[RoomClaim] = set()
        self._declining: set[asyncio.Task[None]] = set()

    @property
    def open_claims(self) -> int:
        """How many claims have not ended."""
        return len(self._claims)

    def claim(
        self, ticket: Ticket, on_arrived: Callable[[], None], on_lost: Callable[[BatonError], None]
    ) -> "RoomClaim":
        """See `Consumer.claim`."""
        claim = RoomClaim(self, ticket, on_arrived, on_lost)
        self._claims.add(claim)
        return claim

    async def close(self) -> None:
        """Give up every claim and close every channel. Idempotent."""
        await asyncio.gather(*(claim.close() for claim in tuple(self._claims)))
        if self._declining:
            await asyncio.wait(self._declining, timeout=self.options.connect_timeout_s)
        for task in self._declining:
            task.cancel()
        for producer in tuple(self._peers):
            self._drop(producer)
        for client in self._transports:
            await client.close()

    def done(self, claim: "RoomClaim") -> None:
        """Remove a claim that has ended."""
        self._claims.discard(claim)

    def decline(self, ticket: Ticket) -> None:
        """See `Consumer.decline`: without it the producer would hold the KV until the lease expires."""
        task = asyncio.create_task(self._decline(ticket))
        self._declining.add(task)
        task.add_done_callback(self._declining.discard)

    def bootstrap_address(self, ticket: Ticket) -> tuple[str, int] | None:
        """Return the bootstrap address of the producer that was last seen at the ticket's address, if it is known."""
        peer = self._peers.get(self._producers.get((ticket.host, ticket.port), ""))
        return peer.bootstrap_address if peer is not None else None

    def learn_bootstrap_address(self, ticket: Ticket, accepted: wire.Accepted) -> None:
        """Remember the bootstrap address of a producer, if its engine has one."""
        if accepted.bootstrap_address is not None:
            self._peer(accepted.producer).bootstrap_address = accepted.bootstrap_address
            self._producers[ticket.host, ticket.port] = accepted.producer

    def forget_producer(self, ticket: Ticket) -> None:
        """The connection to the ticket's address failed: another process may be there next time."""
        self._producers.pop((ticket.host, ticket.port), None)

    @asynccontextmanager
    async def channel_to(
        self, claim: "RoomClaim", accepted: wire.Accepted, memory: BlockMemory
    ) -> AsyncIterator[tuple[Channel, str]]:
        """Provide the channel to a producer's `memory`, and its transport; the first claim negotiates it.

        A block that raises PeerLost has found it broken: later claims negotiate another one, and those that use this
        one go on with it.
        """
        producer = accepted.producer
        peer = self._peer(producer)
        with peer.in_use():
            channel = await peer.negotiated(lambda: self._negotiate(claim, accepted, memory))
            try:
                yield channel, peer.transport
            except PeerLost:
                if self._peers.get(producer) is peer:
                    self._drop(producer)
                raise

    def _drop(self, producer: str) -> None:
        """Forget a producer whose channel failed or is idle, and close the channel when nothing uses it."""
        self._peers.pop(producer).drop()
        self._producers = {address: name for address, name in self._producers.items() if name != producer}

    async def connect(self, ticket: Ticket, connection: RoomConnection) -> None:
        """Connect to a producer. Raises PeerLost; the connection is closed then."""
        try:
            await self._connect(ticket, connection)
        except BaseException:
            # Cancelled at the last moment, it is made, and its transport closed: uvloop raises on the next use of that.
            connection.close()
            raise

    async def _connect(self, ticket: Ticket, connection: RoomConnection) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.options.connect_timeout_s):
                if self._tls is None:
                    await loop.create_connection(lambda: connection, ticket.host.strip("[]"), ticket.port)
                else:
                    plain = await connect_to(ticket.host, ticket.port, self.options.connect_timeout_s, self._tls)
                    await loop.create_unix_connection(lambda: connection, sock=plain)
        except PeerLost:
            self.forget_producer(ticket)
            raise
        except OSError as error:  # TimeoutError is one
            self.forget_producer(ticket)
            reason = error.strerror or f"no answer within {self.options.connect_timeout_s:g} s"
            raise PeerLost(f"cannot connect to the worker at {ticket.host}:{ticket.port}: {reason}") from None

    def _peer(self, producer: str) -> ProducerPeer:
        peer = self._peers.get(producer)
        if peer is None:
            self._drop_idle()
            peer = self._peers[producer] = ProducerPeer()
        peer.used_at = time.monotonic()
        return peer

    async def _negotiate(self, claim: "RoomClaim", accepted: wire.Accepted, memory: BlockMemory) -> tuple[Channel, str]:
        problems = [f"it offers {', '.join(accepted.transports)}"]
        for client in self._transports:
            if client.name not in accepted.transports:
                continue
            try:
                opened = await claim.open_transport(client.name)
                if opened.details is None:
                    raise PeerLost(opened.problem)
                return await client.connect(claim.ticket, memory, opened.details), client.name
            except PeerLost as error:
                problems.append(f"{client.name}: {error.message}")
        raise PeerLost(f"no transport reads the other worker's memory ({'; '.join(problems)})")

    async def _decline(self, ticket: Ticket) -> None:
        connection = outgoing_connection(self.options.heartbeat_s, self.options.peer_timeout_s)
        try:
            await self.connect(ticket, connection)
            connection.send(wire.Claim(ticket.room, ticket.secret, self.memory))
            connection.send(wire.encode_error(GIVEN_UP))
        except PeerLost as error:
            log.debug("room %d could not be declined: %s", ticket.room, error.message)
        connection.close()

    def _drop_idle(self) -> None:
        now = time.monotonic()
        for producer, peer in tuple(self._peers.items()):
            if now - peer.used_at > IDLE_PEER_S and not peer.users:
                self._drop(producer)


class RoomClaim:
    """See `Claim`. One task claims, fetches and confirms; any failure cancels it."""

    def __init__(
        self,
        consumer: RoomClient,
        ticket: Ticket,
        on_arrived: Callable[[], None],
        on_lost: Callable[[BatonError], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ticket = ticket
        self.cached_tokens: int | None = None
        self.transport: str | None = None
        self.moved_bytes = 0
        self._consumer = consumer
        self._on_arrived = on_arrived
        self._on_lost = on_lost
        self._connection = outgoing_connection(consumer.options.heartbeat_s, consumer.options.peer_timeout_s)
        self._connection.on_message = self._receive
        self._connection.on_lost = self._lose_connection
        self._wanted: asyncio.Future[tuple[KvWanted, ...]] = loop.create_future()
        self._media: asyncio.Future[tuple[PlacedItem, ...]] = loop.create_future()
        self._accepted: asyncio.Future[wire.Accepted] = loop.create_future()
        self._opened: dict[str, asyncio.Future[wire.Opened]] = {}  # by transport
        self._released: asyncio.Future[None] = loop.create_future()
        self._taken: asyncio.Future[None] = loop.create_future()
        self._computed: asyncio.Queue[wire.Computed] = asyncio.Queue()
        self._assumed_address: tuple[str, int] | None = None  # returned before the claim was accepted
        self._error: BatonError | None = None
        self._closed = False
        self._claim_sent = False
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._clean_up)

    async def media(self) -> tuple[PlacedItem, ...]:
        """See `Claim.media`."""
        return await self._received(self._media)

    async def claimed(self) -> None:
        """See `Claim.claimed`."""
        await self._received(self._accepted)

    async def _received(self, message: asyncio.Future[T]) -> T:
        """Wait for a message of the producer. Raises what the claim failed with."""
        waited: list[asyncio.Future[Any]] = [message, self._task]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not message.done() or message.cancelled():  # cancelled with the task that waits for it
            raise self._error or PeerLost("the claim was closed")
        return message.result()

    async def bootstrap_address(self) -> tuple[str, int]:
        """See `Claim.bootstrap_address`."""
        known = self._consumer.bootstrap_address(self.ticket)
        if known is not None and not self._accepted.done() and not self._task.done():
            self._assumed_address = known
            return known
        await self.claimed()
        if (address := self._accepted.result().bootstrap_address) is None:
            raise PeerLost("the prefill worker has no bootstrap address")
        return address

    def taken(self) -> None:
        """See `Claim.taken`."""
        if not self._taken.done():
            self._taken.set_result(None)
            if self._claim_sent:  # else it follows the claim: a connection that begins otherwise is refused
                self._connection.send(wire.Taken())

    def place(self, *wanted: KvWanted) -> None:
        """See `Claim.place`."""
        if not self._wanted.done():
            self._wanted.set_result(wanted)

    def give_up(self) -> None:
        """See `Claim.give_up`."""
        if self._closed or self._task.done():
            return
        self._closed = True
        if self._taken.done() and not self._claim_sent:
            return  # the task confirms that the KV was taken, and ends
        if not self._claim_sent:
            self._consumer.decline(self.ticket)
        elif not self._taken.done():
            self._connection.send(wire.encode_error(GIVEN_UP))
        self._task.cancel()

    async def close(self) -> None:
        """See `Claim.close`."""
        self.give_up()
        await asyncio.wait([self._task])

    async def open_transport(self, transport: str) -> wire.Opened:
        """Request the details of one of the producer's transports. Raises PeerLost."""
        opened = self._opened[transport] = asyncio.get_running_loop().create_future()
        self._connection.send(wire.Open(transport))
        limit_s = self._consumer.answer_timeout_s
        return await _within(limit_s, opened, f"the other worker did not open transport {transport}")

    async def _run(self) -> None:
        """Call a callback whatever happens, unless closed: without one the request waits until its deadline."""
        try:
            await self._get()
            if self._error is None and not self._closed:
                self._on_arrived()
        except asyncio.CancelledError:
            if self._error is None:  # closed from this side
                return
        except BatonError as error:
            self._fail(error)
        except Exception:  # translated for the request and for the producer
            log.exception("room %d: the handoff failed", self.ticket.room)
            self._fail(PeerLost("the handoff failed with an unexpected error; see the log of its worker"))
        if self._error is not None and not self._closed:
            self._on_lost(self._error)

    def _fail(self, error: BatonError) -> None:
        self._error = self._error or error
        self._connection.send(wire.encode_error(error))

    def _clean_up(self, _: asyncio.Task[None]) -> None:
        """A callback, since a task that is cancelled before its first step never runs."""
        self._connection.close()
        self._consumer.done(self)

    async def _get(self) -> None:
        await self._consumer.connect(self.ticket, self._connection)
        self._connection.send(wire.Claim(self.ticket.room, self.ticket.secret, self._consumer.memory))
        self._claim_sent = True
        if self._taken.done():  # the engine was faster than this connection
            self._connection.send(wire.Taken())
        accepted = await self._accepted  # bounded: the producer's claim timeout, or the peer timeout if it is silent
        require_alike(memory := self._consumer.memory, accepted.memory)
        if memory is None or accepted.memory is None:
            await self._taken
            return
        async with self._consumer.channel_to(self, accepted, accepted.memory) as (channel, transport):
            await self._fetch(channel, transport, await self._wanted, memory)
        self._connection.send(wire.Taken())
        problem = "the other worker did not confirm that the blocks were still held"
        await _within(self._consumer.answer_timeout_s, self._released, problem)

    async def _fetch(self, channel: Channel, transport: str, wanted: Sequence[KvWanted], memory: BlockMemory) -> None:
        """Copy the wanted blocks into `memory`, part by part as they are computed."""
        position = 0
        end = max((each.first + len(each.blocks) for each in wanted), default=0)
        while True:
            part = await self._computed.get()
            theirs, mine = _pairs(part.blocks, position, wanted)
            if theirs:
                began = time.perf_counter()
                await channel.fetch(self.ticket, theirs, mine)
                self._consumer.seconds_by_transport[transport].observe(time.perf_counter() - began)
                moved = len(theirs) * memory.planes * memory.block_bytes
                self._consumer.bytes_by_transport[transport] += moved
                self.transport = transport
                self.moved_bytes += moved
            position += len(part.blocks)
            if part.complete:
                break
        if position < end:
            raise PeerLost(f"the other worker has {position} blocks for this request, and {end} are needed")
        self.cached_tokens = part.cached_tokens

    def _receive(self, message: wire.Message) -> None:
        match message:
            case wire.Accepted() if not self._accepted.done():
                self._accept(message)
            case wire.Opened() if message.transport in self._opened:
                self._opened.pop(message.transport).set_result(message)
            case wire.Placed() if not self._media.done():
                self._media.set_result(message.media)
            case wire.Computed():
                self._computed.put_nowait(message)
            case wire.Released() if not self._released.done():
                self._released.set_result(None)
            case wire.Failed():
                error = wire.decode_error(message)
                # A cancelled prefill does not cancel this request, whose client is still there: it can be retried.
                self._lose(PeerLost(error.message) if isinstance(error, Cancelled) else error)
            case _:
                self._lose(PeerLost(f"unexpected message {type(message).__name__}"))

    def _accept(self, message: wire.Accepted) -> None:
        self._consumer.learn_bootstrap_address(self.ticket, message)
        self._accepted.set_result(message)
        if self._assumed_address not in (None, message.bootstrap_address):
            # The engine connects to an address of an earlier process, and would wait there in vain.
            self._lose(PeerLost("the prefill worker was restarted with another bootstrap address"))

    def _lose_connection(self, error: PeerLost) -> None:
        if self._error is None and not self._released.done():  # not closed in the course of the protocol
            self._consumer.forget_producer(self.ticket)
        self._lose(error)

    def _lose(self, error: BatonError) -> None:
        if self._released.done():
            return  # all KV has arrived
        self._error = self._error or error
        self._task.cancel()


def _pairs(blocks: Sequence[int], position: int, wanted: Sequence[KvWanted]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return those of the producer's `blocks`, the first of which is number `position`, that are wanted, and where."""
    theirs: list[int] = []
    mine: list[int] = []
    for each in wanted:
        first, end = max(position, each.first), min(position + len(blocks), each.first + len(each.blocks))
        if first < end:
            theirs += blocks[first - position : end - position]
            mine += each.blocks[first - each.first : end - each.first]
    return tuple(theirs), tuple(mine)


async def _within(limit_s: float, answer: asyncio.Future[T], problem: str) -> T:
    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.shield(answer)
    except TimeoutError:
        raise PeerLost(f"{problem} within {limit_s:g} s") from None
