"""The worker process: build, start, register, serve, drain, stop. The only place that may end the process."""

import asyncio
import cProfile
import gc
import logging
import os
import random
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

from baton.build import build_engine, import_engine
from baton.config import MAX_SYSTEM_PORT, Settings
from baton.control.orders import Orders
from baton.control.presence import Absence, Presence
from baton.control.routes import expose_orders
from baton.errors import BatonError, ConfigError, Draining, EngineDead
from baton.handlers._call import Desk, Limits
from baton.handlers._gate import Gate
from baton.handlers.aggregated import AggregatedHandler
from baton.handlers.embed import EmbedHandler
from baton.handlers.text import TextHandler
from baton.health.canary import Canary, Probe, try_probe
from baton.health.watchdog import watch
from baton.models.tokenizer import HubTokenizer, PassageTokenizer
from baton.notify import beat, notify
from baton.ports.engine import Capabilities, Engine, EngineInfo
from baton.ports.runtime import Endpoint, ModelCard, Runtime, Service
from baton.protocol.codec import decode_request, encode_chunk
from baton.protocol.embeddings import EmbedRequest, TokenLists, decode_embed, encode_embeddings
from baton.protocol.events import LoadSnapshot
from baton.protocol.requests import GenerateRequest, StopConditions
from baton.protocol.text import decode_text, encode_text
from baton.publish.metrics import WorkerMetrics
from baton.runtimes.dynamo.listener import refuse_unusable_address
from baton.runtimes.dynamo.runtime import DynamoRuntime
from baton.signals import stop_on_signals

log = logging.getLogger(__name__)

EXIT_FAILED = 75  # EX_TEMPFAIL: start me again
LAST_WORDS_S = 5.0
ONE_TOKEN = GenerateRequest(token_ids=(1,), stop=StopConditions(max_tokens=1, ignore_eos=True))
ONE_VECTOR = EmbedRequest(model="", source=TokenLists(((1,),)))


def role_of(settings: Settings, capabilities: Capabilities) -> str:
    """Return the role of a worker with such an engine. Raises ConfigError if the engine cannot fill it."""
    role = settings.role
    if role == "auto":
        role = "aggregated" if capabilities.generate else "embed"
    if not (capabilities.embeddings if role == "embed" else capabilities.generate):
        raise ConfigError(f"the model {settings.name} on the engine {settings.engine} cannot fill the role {role}")
    return role


def run_worker(settings: Settings) -> int:
    """Run one worker until it is told to stop; return its exit code. Its model has been prepared."""
    import uvloop

    return uvloop.run(_main(settings))


async def _main(settings: Settings) -> int:
    stop = stop_on_signals()
    port = settings.system_port or _free_port(settings.system_host)
    refuse_unusable_address(settings.system_host, port, "--system-host", "--system-port")
    runtime = DynamoRuntime(
        settings.runtime, settings.system_host, port, settings.reader_stall_s, leave_s=settings.abort_s + 1
    )
    await asyncio.to_thread(import_engine, settings)
    worker = Worker(settings, build_engine(settings), runtime)

    def on_ready() -> None:
        log.info("health and metrics on http://%s:%d", settings.system_host, port)
        gc.freeze()  # what has been loaded stays; the collector need not look at it again
        notify(f"READY=1\nSTATUS=health on {settings.system_host}:{port}")

    profile = cProfile.Profile() if settings.profile_dir else None
    if profile is not None:
        profile.enable()
    try:
        await worker.run(stop, on_ready)
    except ConfigError:
        raise
    except BatonError as error:
        log.critical("%s: %s", error.code, error.message)
        notify(f"STATUS={error.message}")
        return EXIT_FAILED
    finally:
        if profile is not None:
            profile.disable()
            profile.dump_stats(Path(settings.profile_dir) / f"worker-{os.getpid()}.pstats")
    return 0


class Worker:
    """One engine, one role, one runtime, from start to stop."""

    def __init__(self, settings: Settings, engine: Engine, runtime: Runtime) -> None:
        self._settings = settings
        self._engine = engine
        self._runtime = runtime
        self._role = role_of(settings, engine.capabilities)
        self._metrics = WorkerMetrics(self._role)
        self.gate = Gate(settings.max_in_flight)
        self._limits = Limits(
            deadline_s=settings.deadline_s, abort_s=settings.abort_s, flush_s=settings.flush_ms / 1000
        )
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._metrics.in_flight.set_function(lambda: self.gate.in_flight)

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Serve until `stop` is set, then drain. Raises ConfigError, or the scope-"worker" error that ended it."""
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(beat(stop.set), name="heartbeat")]
        try:
            starting = asyncio.create_task(self._start(), name="start")
            stopping = asyncio.create_task(stop.wait(), name="stop")
            tasks += [starting, stopping]
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                endpoint, orders, probe = starting.result()
                on_ready()
                await self._serve(endpoint, orders, probe, stopping)
        finally:
            await self._runtime.shutdown()
            await _bounded("the engine did not stop", self._engine.stop(), self._settings.abort_s)
            await _cancel(tasks)

    async def _start(self) -> tuple[Endpoint, Orders, Probe]:
        """Bring everything up, in time."""
        try:
            async with asyncio.timeout(self._settings.start_s):
                info = await self._engine.start()
                await self._runtime.start()
                opened = await self._open(info)
        except TimeoutError:
            raise EngineDead(f"the start took longer than {self._settings.start_s:g} s") from None
        log.info("serving %s as %s on the %s engine", info.model_name, self._role, self._settings.engine)
        return opened

    async def _open(self, info: EngineInfo) -> tuple[Endpoint, Orders, Probe]:
        """Serve the endpoint, see that the role works, and only then be found."""
        self._runtime.expose_metrics(self._metrics.render)
        self._runtime.expose("live", self._answer_live)
        service, probe = self._fill_role(info)
        endpoint = await self._runtime.serve(f"{self._settings.namespace}.worker.generate", service)
        problem = await try_probe(probe, self._settings.canary_timeout_s)
        if problem is not None:
            raise EngineDead(f"the first probe failed: {problem}")
        await endpoint.advertise(self._card(info))
        self._set_healthy(True)
        return endpoint, self._take_orders(endpoint), probe

    def _take_orders(self, endpoint: Endpoint) -> Orders:
        presence = Presence(endpoint, self.gate, self._runtime.set_ready, LAST_WORDS_S)
        orders = Orders(self._engine, presence, self.gate, self._settings.control_s, self._fail)
        if self._settings.takes_orders:
            expose_orders(self._runtime, orders)
        return orders

    def _fill_role(self, info: EngineInfo) -> tuple[Service[Any, Any], Probe]:
        """Return what serves the role, and a probe: the least that the role does, done as for a client.

        The probe goes through a gate of its own, so that it is never refused.
        """
        engine, directory = self._engine, Path(info.model_dir)
        desk = Desk(self.gate, self._limits, self._metrics, self._role, self._fail)
        side_desk = Desk(Gate(1), self._limits, self._metrics, "canary", self._fail)
        if self._role == "embed":
            encoder = PassageTokenizer(directory)
            embed = EmbedHandler(engine, info, desk, encoder)
            embed_probe = EmbedHandler(engine, info, side_desk, encoder)
            service: Service[Any, Any] = Service(embed.embed, decode_embed, encode_embeddings)
            return service, lambda: _exhaust(embed_probe.embed(ONE_VECTOR, _ProbeContext()))
        probe = AggregatedHandler(engine, info, side_desk)
        if self._settings.accepts == "tokens":
            service = Service(AggregatedHandler(engine, info, desk).generate, decode_request, encode_chunk)
        else:
            text = TextHandler(engine, info, desk, HubTokenizer(directory))
            service = Service(text.generate, decode_text, encode_text)
        return service, lambda: _exhaust(probe.generate(ONE_TOKEN, _ProbeContext()))

    async def _serve(self, endpoint: Endpoint, orders: Orders, probe: Probe, stopping: asyncio.Task[bool]) -> None:
        """Serve until told to stop or until something fails that a restart must mend, then leave."""

        async def on_change(healthy: bool, problem: str) -> None:
            self._metrics.healthy.set(healthy)
            # A worker that cannot leave discovery, or come back, is of no use: the failure ends it.
            await (orders.presence.come_back if healthy else orders.presence.leave)(Absence.ILL)

        canary = Canary(
            probe,
            lambda: self.gate.in_flight > 0,
            on_change,
            self._settings.canary_s,
            self._settings.canary_timeout_s,
            self._settings.stall_s,
            lambda: orders.excused,
        )
        probing = self._guard("canary", canary.run())
        guards = [
            probing,
            self._guard("watchdog", watch(self._engine, self._settings.stall_s, lambda: orders.excused)),
            self._guard("readings", self._read_engine(endpoint)),
        ]
        try:
            await self._first_of(stopping)
            probing.cancel()  # it must not bring a worker back that is leaving
            await self._leave(orders)
        finally:
            await _cancel(guards)
        if self._fatal.done():
            self._fatal.result()

    async def _leave(self, orders: Orders) -> None:
        """Leave discovery, let requests finish for `drain_s`, fail the rest so that they move elsewhere.

        A failure, before or meanwhile, cuts it short.
        """
        self.gate.drain()
        orders.close()
        self._set_healthy(False)
        await _bounded("could not leave discovery", orders.presence.aclose(), LAST_WORDS_S)
        log.info("draining %d requests for up to %g s", self.gate.in_flight, self._settings.drain_s)
        idle = asyncio.create_task(self.gate.idle(self._settings.drain_s))
        await self._first_of(idle)
        await _cancel([idle])
        if self.gate.in_flight:
            error = self._fatal.exception() if self._fatal.done() else None
            self.gate.fire_all(error if isinstance(error, BatonError) else Draining("this worker is shutting down"))
            await self.gate.idle(self._settings.abort_s + 1)

    async def _first_of(self, task: asyncio.Task[bool]) -> None:
        """Wait for `task`, or for a failure that ends the worker."""
        reasons: list[asyncio.Future[Any]] = [task, self._fatal]
        await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)

    def _guard(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[Any]:
        """Run `work` beside the requests; its failure is the worker's."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._on_guard_done)
        return task

    async def _read_engine(self, endpoint: Endpoint) -> None:
        async with aclosing(self._engine.readings()) as readings:
            async for reading in readings:
                if isinstance(reading, LoadSnapshot):
                    self._metrics.load(reading)
                else:
                    endpoint.tell(reading)

    async def _answer_live(self, _: dict[str, object]) -> dict[str, object]:
        return {"state": self.gate.state.value, "in_flight": self.gate.in_flight}

    def _set_healthy(self, healthy: bool) -> None:
        self._metrics.healthy.set(healthy)
        self._runtime.set_ready(healthy)

    def _fail(self, error: BatonError) -> None:
        if not self._fatal.done():
            self._fatal.set_exception(error)
            self._fatal.exception()  # marked as read: when the start fails, nobody waits for it

    def _on_guard_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error if isinstance(error, BatonError) else EngineDead(f"{task.get_name()}: {error!r}"))

    def _card(self, info: EngineInfo) -> ModelCard:
        embeds = self._role == "embed"
        return ModelCard(
            name=info.model_name,
            directory=info.model_dir,
            # The frontend cannot tokenise for encoders: it asks every model for an end-of-text token.
            accepts="text" if embeds else self._settings.accepts,
            surfaces=frozenset({"embeddings"} if embeds else {"chat", "completions"}),
            context_length=info.context_length,
            block_size=info.block_size,
            total_blocks=info.total_blocks,
            max_running=info.max_running,
            # A router compares tokens; where the worker makes them, it has none.
            kv_events=not embeds and self._settings.accepts == "tokens",
        )


async def _exhaust(replies: AsyncGenerator[Any, None]) -> None:
    async with aclosing(replies):
        async for _ in replies:
            pass


async def _bounded(complaint: str, work: Coroutine[Any, Any, None], limit_s: float) -> None:
    """Do `work` on the way out: what fails or takes too long is complained of, and left."""
    try:
        await asyncio.wait_for(work, limit_s)
    except Exception as problem:  # noqa: BLE001 - we leave all the same
        log.warning("%s: %r", complaint, problem)


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


class _ProbeContext:
    """The canary is its own client, and does not leave."""

    id = "canary"
    trace_headers: dict[str, str] = {}

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Nothing to call: nobody leaves."""


def _free_port(host: str) -> int:
    """Return a port for the system server, which takes none above 32767."""
    for port in random.sample(range(10_000, MAX_SYSTEM_PORT), 100):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise ConfigError(f"no free port on {host} for /health and /metrics; give one with --system-port")
