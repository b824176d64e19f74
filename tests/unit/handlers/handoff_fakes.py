"""A prefill and a decode handler around a scripted engine, with fake rooms that record what is done to them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from baton.errors import BatonError
from baton.handlers.decode import DecodeHandler
from baton.handlers.prefill import PrefillHandler
from baton.handlers.probe import ProbeHandler
from baton.ports.engine import EngineInfo
from baton.ports.transfer import BlockMemory, KvShape
from baton.protocol.handoff import Ticket
from baton.protocol.lifecycle import State
from baton.protocol.media import PlacedItem
from baton.protocol.outputs import KvComputed, KvWanted
from baton.request.gate import Gate
from baton.request.tracker import RequestLimits, RequestTracker
from baton.testing import RecordingObserver
from baton.testing.fakes import SCRIPTED_INFO
from baton.testing.memory_runtime import MemoryContext

SHAPE = KvShape(model="tiny", dtype="float32", layers=1, kv_heads=1, head_dim=4, block_size=16)
MEMORY = BlockMemory(shape=SHAPE, address=0, planes=2, plane_bytes=0, block_bytes=256, blocks=0)
INFO_WITH_KV = msgspec.structs.replace(SCRIPTED_INFO, kv=MEMORY)


class FakeLease:
    """A Lease that records its calls; a test ends it with `end` or `lose`."""

    def __init__(self) -> None:
        self.offered: list[KvComputed] = []
        self.claimed = False
        self.media: tuple[PlacedItem, ...] | None = None
        self.failed: BatonError | None = None
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_lost: Callable[[BatonError], None] | None = None

    def placed(self, media: Sequence[PlacedItem]) -> None:
        self.media = tuple(media)

    def computed(self, output: KvComputed) -> None:
        self.offered.append(output)

    def on_lost(self, callback: Callable[[BatonError], None]) -> None:
        self._on_lost = callback

    def fail(self, error: BatonError) -> None:
        if not self.end.done():
            self.failed = error
            self.lose(error)

    def lose(self, error: BatonError) -> None:
        self.end.set_exception(error)
        self.end.exception()
        if self._on_lost is not None:
            self._on_lost(error)

    async def ended(self) -> None:
        await asyncio.shield(self.end)


class FakeProducer:
    """A Producer that records its calls."""

    address = ("127.0.0.1", 4000)

    def __init__(self, error: BaseException | None = None) -> None:
        self.offers: list[tuple[Ticket, int]] = []
        self.leases: list[FakeLease] = []
        self.refused: list[tuple[Ticket, BatonError]] = []
        self.before_offer: Callable[[], None] = lambda: None
        self._error = error

    def offer(self, ticket: Ticket, prompt_tokens: int) -> FakeLease:
        self.before_offer()
        if self._error is not None:
            raise self._error
        self.offers.append((ticket, prompt_tokens))
        self.leases.append(FakeLease())
        return self.leases[-1]

    def refuse(self, ticket: Ticket, error: BatonError) -> None:
        self.refused.append((ticket, error))


class FakeClaim:
    """A Claim that records its calls; `close` waits for `may_close`."""

    def __init__(self, on_arrived: Callable[[], None], on_lost: Callable[[BatonError], None]) -> None:
        self.on_arrived = on_arrived
        self.on_lost = on_lost
        self.cached_tokens: int | None = None
        self.transport: str | None = None
        self.moved_bytes = 0
        self.placed: list[KvWanted] = []
        self.given_up = 0
        self.was_taken = 0
        self.accepted: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        self.placed_media: asyncio.Future[tuple[PlacedItem, ...]] = asyncio.get_running_loop().create_future()
        self.closed = 0
        self.on_close: Callable[[], None] = lambda: None
        self.may_close = asyncio.Event()
        self.may_close.set()

    async def media(self) -> tuple[PlacedItem, ...]:
        return await asyncio.shield(self.placed_media)

    async def claimed(self) -> None:
        await asyncio.shield(self.accepted)

    async def bootstrap_address(self) -> tuple[str, int]:
        return await asyncio.shield(self.accepted)

    def taken(self) -> None:
        self.was_taken += 1

    def place(self, *wanted: KvWanted) -> None:
        self.placed += wanted

    def give_up(self) -> None:
        self.given_up += 1

    async def close(self) -> None:
        if not self.closed:
            self.on_close()
        await self.may_close.wait()
        self.closed += 1


class FakeConsumer:
    """A Consumer that records its calls."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.claims: list[FakeClaim] = []
        self.declined: list[Ticket] = []
        self.media: tuple[PlacedItem, ...] | None = None  # of every claim, from its start on

    def claim(self, ticket: Ticket, on_arrived: Callable[[], None], on_lost: Callable[[BatonError], None]) -> FakeClaim:
        self.tickets.append(ticket)
        self.claims.append(FakeClaim(on_arrived, on_lost))
        if self.media is not None:
            self.claims[-1].placed_media.set_result(self.media)
        return self.claims[-1]

    def decline(self, ticket: Ticket) -> None:
        self.declined.append(ticket)


class Harness:
    """Handlers of both roles around an engine, scripted mostly, without a runtime and without a network."""

    def __init__(
        self,
        engine: Any,
        producer: FakeProducer | None = None,
        request_timeout_s: float = 60.0,
        limit: int = 8,
        info: EngineInfo = INFO_WITH_KV,
    ) -> None:
        self.engine = engine
        self.gate = Gate(limit)
        self.observer = RecordingObserver()
        self.producer = producer or FakeProducer()
        self.consumer = FakeConsumer()
        self.context = MemoryContext()
        limits = RequestLimits(flush_interval_s=0.0, request_timeout_s=request_timeout_s, abort_timeout_s=0.2)
        tracker = RequestTracker(self.gate, limits, self.observer, "role", lambda error: None)
        self.prefill = PrefillHandler(engine, info, tracker, self.producer)
        self.decode = DecodeHandler(engine, info, tracker, self.consumer)
        self.probe = ProbeHandler(engine, info, tracker)

    @property
    def lease(self) -> FakeLease:
        return self.producer.leases[0]

    @property
    def claim(self) -> FakeClaim:
        return self.consumer.claims[0]

    def ended(self) -> State:
        [record] = self.observer.records
        assert self.gate.in_flight == 0
        return record.state

    def freed(self) -> bool:
        return {work.request_id for work in self.engine.submitted} <= set(self.engine.aborted)
