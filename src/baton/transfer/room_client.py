"""The decode side: claiming rooms of prefill workers and fetching what they hold, while it is computed."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from baton.config.transfer import KvTransferOptions, chosen_transports
from baton.errors import BatonError, Cancelled, ConfigError, PeerLost
from baton.ports.transfer import Channel, KvMemory, TransportClient
from baton.protocol.handoff import Ticket
from baton.protocol.outputs import KvWanted
from baton.transfer import nixl, wire
from baton.transfer.block_copy import require_alike
from baton.transfer.connection import RoomConnection, outgoing_connection
from baton.transfer.shm import ShmClient
from baton.transfer.tcp import TcpClient
from baton.transfer.wire import failed, failure

OPEN_S = 10.0
IDLE_PEER_S = 600.0
NOT_WANTED = Cancelled("the KV is not wanted any more")

T = TypeVar("T")


def open_room_client(options: KvTransferOptions, memory: KvMemory | None) -> "RoomClient":
    """Return what fetches KV of others into `memory`, or claims it for an engine that fetches by itself.

    Raises ConfigError.
    """
    return RoomClient(options, memory, _reaches(options, memory) if memory is not None else ())


class _Peer:
    """One run of a lender's process, and the way to its memory that was found to work."""

    def __init__(self) -> None:
        self.path: Channel | None = None
        self.transport = ""
        self.negotiating = asyncio.Lock()
        self.used_at = 0.0


class RoomClient:
    """A Consumer (see `ports/transfer.py`). Event-loop thread only."""

    def __init__(self, options: KvTransferOptions, memory: KvMemory | None, reaches: Sequence[TransportClient]) -> None:
        self.options = options
        self.memory = memory
        self.bytes_by_transport: defaultdict[str, float] = defaultdict(float)
        self.seconds_by_transport: defaultdict[str, float] = defaultdict(float)
        self._reaches = reaches
        self._peers: dict[str, _Peer] = {}
        self._loans: set[RoomClaim] = set()
        self._declining: set[asyncio.Task[None]] = set()

    def claim(
        self, ticket: Ticket, on_arrived: Callable[[], None], on_lost: Callable[[BatonError], None]
    ) -> "RoomClaim":
        """See `Borrower.borrow`."""
        claim = RoomClaim(self, ticket, on_arrived, on_lost)
        self._loans.add(claim)
        return claim

    async def close(self) -> None:
        """Give up every loan and every path. Idempotent."""
        await asyncio.gather(*(claim.close() for claim in tuple(self._loans)))
        if self._declining:
            await asyncio.wait(self._declining, timeout=self.options.connect_timeout_s)
        for task in self._declining:
            task.cancel()
        for name in tuple(self._peers):
            self.drop(name)
        for connect in self._reaches:
            await connect.close()

    def done(self, claim: "RoomClaim") -> None:
        """A loan has ended."""
        self._loans.discard(claim)

    def decline(self, ticket: Ticket) -> None:
        """See `Borrower.decline`: the lender must not hold the KV until it expires."""
        task = asyncio.create_task(self._decline(ticket))
        self._declining.add(task)
        task.add_done_callback(self._declining.discard)

    async def path_to(self, claim: "RoomClaim", accepted: wire.Accepted, memory: KvMemory) -> tuple[Channel, str]:
        """Return the path from a lender's `memory`, and its name; the first loan from it finds out which way works."""
        peer = self._peers.get(accepted.producer)
        if peer is None:
            self._drop_idle()
            peer = self._peers[accepted.producer] = _Peer()
        peer.used_at = time.monotonic()
        async with peer.negotiating:
            if peer.path is None:
                peer.path, peer.transport = await self._negotiate(claim, accepted, memory)
            return peer.path, peer.transport

    def drop(self, producer: str) -> None:
        """Forget the way to a lender: it does not work, or is not needed."""
        peer = self._peers.pop(producer, None)
        if peer is not None and peer.path is not None:
            peer.path.close()

    async def connect(self, ticket: Ticket, line: RoomConnection) -> None:
        """Call a lender. Raises PeerLost."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.options.connect_timeout_s):
                await loop.create_connection(lambda: line, ticket.host.strip("[]"), ticket.port)
        except OSError as error:  # TimeoutError is one
            reason = error.strerror or f"no answer within {self.options.connect_timeout_s:g} s"
            raise PeerLost(f"cannot reach the prefill worker at {ticket.host}:{ticket.port}: {reason}") from None

    async def _negotiate(self, claim: "RoomClaim", accepted: wire.Accepted, memory: KvMemory) -> tuple[Channel, str]:
        problems = [f"it offers {', '.join(accepted.transports)}"]
        for connect in self._reaches:
            if connect.name not in accepted.transports:
                continue
            opened = await claim.ask(wire.Open(connect.name))
            try:
                if opened.details is None:
                    raise PeerLost(opened.problem)
                return await connect.connect(claim.ticket, memory, opened.details), connect.name
            except PeerLost as error:
                problems.append(f"{connect.name}: {error.message}")
        raise PeerLost(f"no way to read the prefill worker's memory ({'; '.join(problems)})")

    async def _decline(self, ticket: Ticket) -> None:
        line = outgoing_connection(self.options.heartbeat_s, self.options.peer_timeout_s)
        with suppress(PeerLost):
            await self.connect(ticket, line)
            line.send(wire.Claim(ticket.room, ticket.secret, self.memory))
            line.send(failed(NOT_WANTED))
        line.close()

    def _drop_idle(self) -> None:
        now = time.monotonic()
        for name, peer in tuple(self._peers.items()):
            if now - peer.used_at > IDLE_PEER_S and not peer.negotiating.locked():
                self.drop(name)


class RoomClaim:
    """See `Claim`. One task claims, fetches and confirms; whatever goes wrong cancels it."""

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
        self._consumer = consumer
        self._on_arrived = on_arrived
        self._on_lost = on_lost
        self._line = outgoing_connection(consumer.options.heartbeat_s, consumer.options.peer_timeout_s)
        self._line.on_message = self._hear
        self._line.on_lost = self._lose
        self._wanted: asyncio.Future[KvWanted] = loop.create_future()
        self._accepted: asyncio.Future[wire.Accepted] = loop.create_future()
        self._opened: asyncio.Future[wire.Opened] = loop.create_future()
        self._released: asyncio.Future[None] = loop.create_future()
        self._taken: asyncio.Future[None] = loop.create_future()
        self._computed: asyncio.Queue[wire.Computed] = asyncio.Queue()
        self._error: BatonError | None = None
        self._closed = False
        self._claimed = False
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._clean_up)

    async def claimed(self) -> None:
        """See `Loan.claimed`."""
        waited: list[asyncio.Future[Any]] = [self._accepted, self._task]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not self._accepted.done() or self._accepted.cancelled():  # cancelled with the task that waits for it
            raise self._error or PeerLost("the KV is not wanted any more")

    async def meeting(self) -> tuple[str, int]:
        """See `Loan.meeting`."""
        await self.claimed()
        if (meeting := self._accepted.result().meeting) is None:
            raise PeerLost("the prefill worker does not say where the engines meet")
        return meeting

    def taken(self) -> None:
        """See `Loan.taken`."""
        if not self._taken.done():
            self._taken.set_result(None)
            self._line.send(wire.Taken())

    def place(self, wanted: KvWanted) -> None:
        """See `Loan.place`."""
        if not self._wanted.done():
            self._wanted.set_result(wanted)

    def give_up(self) -> None:
        """See `Loan.give_up`."""
        if self._closed or self._task.done():
            return
        self._closed = True
        if not self._claimed:
            self._consumer.decline(self.ticket)
        elif not self._taken.done():
            self._line.send(failed(NOT_WANTED))
        self._task.cancel()

    async def close(self) -> None:
        """See `Loan.close`."""
        self.give_up()
        await asyncio.wait([self._task])

    async def ask(self, question: wire.Open) -> wire.Opened:
        """Ask the lender how its memory can be read. Raises PeerLost."""
        self._opened = asyncio.get_running_loop().create_future()
        self._line.send(question)
        return await _within(OPEN_S, self._opened, f"the prefill worker did not open the way {question.transport}")

    async def _run(self) -> None:
        try:
            await self._get()
        except asyncio.CancelledError:
            if self._error is None:  # closed from this side
                return
        except BatonError as error:
            self._line.send(failed(error))
            self._error = self._error or error
        if self._closed:
            return
        if self._error is None:
            self._on_arrived()
        else:
            self._on_lost(self._error)

    def _clean_up(self, _: asyncio.Task[None]) -> None:
        """A callback, since a task that is cancelled at once never runs."""
        self._line.close()
        self._consumer.done(self)

    async def _get(self) -> None:
        await self._consumer.connect(self.ticket, self._line)
        self._line.send(wire.Claim(self.ticket.room, self.ticket.secret, self._consumer.memory))
        self._claimed = True
        accepted = await self._accepted  # the lender answers in time, or falls silent and is taken for lost
        require_alike(memory := self._consumer.memory, accepted.memory)
        if memory is None or accepted.memory is None:
            await self._taken
            return
        path, transport = await self._consumer.path_to(self, accepted, accepted.memory)
        wanted = await self._wanted
        try:
            await self._fetch(path, transport, wanted, memory)
        except PeerLost:
            self._consumer.drop(accepted.producer)
            raise
        self._line.send(wire.Taken())
        await _within(OPEN_S, self._released, "the prefill worker did not confirm that the KV was still held")

    async def _fetch(self, path: Channel, transport: str, wanted: KvWanted, memory: KvMemory) -> None:
        """Copy what is wanted into `memory`, part by part as it is computed."""
        place = 0
        last = wanted.first + len(wanted.blocks)
        while True:
            part = await self._computed.get()
            skipped = max(0, wanted.first - place)
            theirs = part.blocks[skipped : max(skipped, last - place)]
            start = max(place, wanted.first) - wanted.first
            if theirs:
                began = time.perf_counter()
                await path.fetch(self.ticket, theirs, wanted.blocks[start : start + len(theirs)])
                self._consumer.seconds_by_transport[transport] += time.perf_counter() - began
                self._consumer.bytes_by_transport[transport] += len(theirs) * memory.planes * memory.block_bytes
            place += len(part.blocks)
            if part.complete:
                break
        if place < last:
            raise PeerLost(f"the prefill worker has {place} blocks of this prompt, and {last} are needed")
        self.cached_tokens = part.cached_tokens

    def _hear(self, message: wire.Message) -> None:
        match message:
            case wire.Accepted() if not self._accepted.done():
                self._accepted.set_result(message)
            case wire.Opened() if not self._opened.done():
                self._opened.set_result(message)
            case wire.Computed():
                self._computed.put_nowait(message)
            case wire.Released() if not self._released.done():
                self._released.set_result(None)
            case wire.Failed():
                error = failure(message)
                # The prefill was cancelled, but nobody has told us that our client has left: then it begins anew.
                self._lose(PeerLost(error.message) if isinstance(error, Cancelled) else error)
            case _:
                self._lose(PeerLost(f"{type(message).__name__} was not expected"))

    def _lose(self, error: BatonError) -> None:
        if self._released.done():
            return  # everything is here
        self._error = self._error or error
        self._task.cancel()


async def _within(limit_s: float, answer: asyncio.Future[T], complaint: str) -> T:
    try:
        return await asyncio.wait_for(asyncio.shield(answer), limit_s)
    except TimeoutError:
        raise PeerLost(f"{complaint} within {limit_s:g} s") from None


def _reaches(options: KvTransferOptions, memory: KvMemory) -> Sequence[TransportClient]:
    """Return the ways in which this worker can read the memory of others, best first."""
    reaches: list[TransportClient] = []
    for transport in chosen_transports(options):
        if transport == "nixl" and nixl.available():
            reaches.append(nixl.NixlClient(memory))
        elif transport == "shm" and memory.device == "cpu":
            reaches.append(ShmClient(memory))
        elif transport == "tcp" and memory.device == "cpu":
            reaches.append(TcpClient(memory, options.checksum, options.connect_timeout_s))
    if not reaches:
        raise ConfigError(f"none of the ways {options.transports} (--kv-transports) works here")
    return reaches
