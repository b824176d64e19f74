"""The worker process: build, start, register, serve, drain, stop. The only place that may end the process."""

import asyncio
import cProfile
import gc
import logging
import os
import random
import socket
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

from baton.config import MAX_SYSTEM_PORT, Settings
from baton.engines.echo import EchoEngine
from baton.engines.echo.engine import MODEL_DIR
from baton.errors import BatonError, ConfigError, Draining, EngineDead
from baton.handlers._call import Desk, Limits
from baton.handlers._gate import Gate
from baton.handlers.aggregated import AggregatedHandler
from baton.handlers.text import TextHandler
from baton.health.canary import Canary, try_probe
from baton.health.watchdog import watch
from baton.models.directory import resolve_model
from baton.models.tokenizer import HubTokenizer
from baton.notify import beat, notify
from baton.ports.engine import Engine, EngineInfo
from baton.ports.runtime import Endpoint, ModelCard, Runtime, Service
from baton.protocol.codec import decode_request, encode_chunk
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


def _echo(settings: Settings) -> Engine:
    directory = resolve_model(settings.model) if settings.model else MODEL_DIR
    return EchoEngine(settings.echo, directory, settings.name or (directory.name if settings.model else "echo"))


ENGINES: dict[str, Callable[[Settings], Engine]] = {"echo": _echo}


def build_engine(settings: Settings) -> Engine:
    """Return the engine that `settings` name. Raises ConfigError."""
    if settings.engine not in ENGINES:
        raise ConfigError(f"unknown engine {settings.engine!r}; choose one of: {', '.join(sorted(ENGINES))}")
    return ENGINES[settings.engine](settings)


def run_worker(settings: Settings) -> int:
    """Run one worker until it is told to stop; return its exit code."""
    import uvloop

    return uvloop.run(_main(settings))


async def _main(settings: Settings) -> int:
    stop = stop_on_signals()
    port = settings.system_port or _free_port(settings.system_host)
    refuse_unusable_address(settings.system_host, port, "--system-host", "--system-port")
    runtime = DynamoRuntime(
        settings.runtime, settings.system_host, port, settings.reader_stall_s, leave_s=settings.abort_s + 1
    )
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
        self._metrics = WorkerMetrics(settings.role)
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
                info, endpoint = starting.result()
                on_ready()
                await self._serve(endpoint, info, stopping)
        finally:
            await self._runtime.shutdown()
            await _bounded("the engine did not stop", self._engine.stop(), self._settings.abort_s)
            await _cancel(tasks)

    async def _start(self) -> tuple[EngineInfo, Endpoint]:
        """Bring everything up, in time."""
        try:
            async with asyncio.timeout(self._settings.start_s):
                info = await self._engine.start()
                await self._runtime.start()
                endpoint = await self._open(info)
        except TimeoutError:
            raise EngineDead(f"the start took longer than {self._settings.start_s:g} s") from None
        settings = self._settings
        log.info("serving %s as %s on the %s engine", info.model_name, settings.role, settings.engine)
        return info, endpoint

    async def _open(self, info: EngineInfo) -> Endpoint:
        """Serve the endpoint, see that the role works, and only then be found."""
        self._runtime.expose_metrics(self._metrics.render)
        self._runtime.expose("live", self._answer_live)
        endpoint = await self._runtime.serve(f"{self._settings.namespace}.worker.generate", self._service(info))
        problem = await try_probe(lambda: self._probe(info), self._settings.canary_timeout_s)
        if problem is not None:
            raise EngineDead(f"the first probe failed: {problem}")
        await endpoint.advertise(self._card(info))
        self._set_healthy(True)
        return endpoint

    def _service(self, info: EngineInfo) -> Service[Any, Any]:
        desk = Desk(self.gate, self._limits, self._metrics, self._settings.role, self._fail)
        if self._settings.accepts == "tokens":
            return Service(AggregatedHandler(self._engine, info, desk).generate, decode_request, encode_chunk)
        text = TextHandler(self._engine, info, desk, HubTokenizer(Path(info.model_dir)))
        return Service(text.generate, decode_text, encode_text)

    async def _probe(self, info: EngineInfo) -> None:
        """Make one token the way a client's request would; through a gate of its own, so that it is never refused."""
        desk = Desk(Gate(1), self._limits, self._metrics, "canary", self._fail)
        handler = AggregatedHandler(self._engine, info, desk)
        request = GenerateRequest(token_ids=(1,), stop=StopConditions(max_tokens=1, ignore_eos=True))
        async with aclosing(handler.generate(request, _ProbeContext())) as chunks:
            async for _ in chunks:
                pass

    async def _serve(self, endpoint: Endpoint, info: EngineInfo, stopping: asyncio.Task[bool]) -> None:
        """Serve until told to stop or until something fails that a restart must mend, then leave."""

        async def on_change(healthy: bool, problem: str) -> None:
            self._set_healthy(healthy)
            # A worker that cannot leave discovery, or come back, is of no use: the failure ends it.
            await asyncio.wait_for(endpoint.restore() if healthy else endpoint.withdraw(), LAST_WORDS_S)

        canary = Canary(
            lambda: self._probe(info),
            lambda: self.gate.in_flight > 0,
            on_change,
            self._settings.canary_s,
            self._settings.canary_timeout_s,
            self._settings.stall_s,
        )
        probing = self._guard("canary", canary.run())
        guards = [
            probing,
            self._guard("watchdog", watch(self._engine, self._settings.stall_s)),
            self._guard("readings", self._read_engine()),
        ]
        try:
            await self._first_of(stopping)
            probing.cancel()  # it must not bring a worker back that is leaving
            await self._leave(endpoint)
        finally:
            await _cancel(guards)
        if self._fatal.done():
            self._fatal.result()

    async def _leave(self, endpoint: Endpoint) -> None:
        """Leave discovery, let requests finish for `drain_s`, fail the rest so that they move elsewhere.

        A failure, before or meanwhile, cuts it short.
        """
        self.gate.drain()
        self._set_healthy(False)
        await _bounded("could not leave discovery", endpoint.withdraw(), LAST_WORDS_S)
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

    async def _read_engine(self) -> None:
        async with aclosing(self._engine.readings()) as readings:
            async for reading in readings:
                if isinstance(reading, LoadSnapshot):
                    self._metrics.load(reading)

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
        return ModelCard(
            name=info.model_name,
            directory=info.model_dir,
            accepts=self._settings.accepts,
            context_length=info.context_length,
            block_size=info.block_size,
            total_blocks=info.total_blocks,
            max_running=info.max_running,
        )


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
