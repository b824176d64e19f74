"""The worker process: build, start, register, serve, drain, stop. The only place that may end the process."""

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any, NamedTuple

from baton.config.directories import profile_directory
from baton.config.load import control_token
from baton.config.settings import Settings
from baton.control.controller import Controller
from baton.control.discovery import DeregisterReason, DiscoveryRegistration
from baton.control.http.schemas import Health, State
from baton.control.http.server import SystemServer
from baton.engines.registry import build_engine, import_engine
from baton.errors import BatonError, Draining, EngineDead, Unsupported
from baton.health.canary import Canary, Probe, try_probe
from baton.health.watchdog import watch
from baton.metrics.exposition import TimedScrape, join
from baton.metrics.worker import WorkerMetrics
from baton.ports.engine import Engine, EngineInfo
from baton.ports.runtime import Endpoint, Runtime
from baton.process.exit_codes import exit_code
from baton.process.follower_events import FollowerEvents, Listener, node_path
from baton.process.kv_compatibility import kv_path, kv_service, refuse_unlike_peers
from baton.process.roles import RoleContext, RoleService, announce, build_role, path_of, role_of
from baton.process.signals import stop_on_signals
from baton.protocol.events import LoadSnapshot
from baton.request.gate import Gate, GateState
from baton.request.tracker import RequestLimits, RequestTracker
from baton.runtimes.dynamo.runtime import DynamoRuntime
from baton.status.sd_notify import notify, send_heartbeats

log = logging.getLogger(__name__)

LAST_WORDS_S = 5.0
CANCEL_TRIES = 3
REGISTRATION_CHECKS = 2
METRICS_S = 3.0


def run_worker(settings: Settings) -> int:
    """Run one worker until it is told to stop; return its exit code. Its model has been prepared."""
    import uvloop

    return uvloop.run(_main(settings))


async def _main(settings: Settings) -> int:
    stop = stop_on_signals(drain_timeout_s=settings.drain_timeout_s)
    token = control_token(settings)
    server = SystemServer(
        settings.system_host, settings.system_port, accepts_commands=settings.accepts_commands, token=token
    )
    await server.start()
    try:
        return await _work(settings, stop, server)
    finally:
        await server.aclose()


async def _work(settings: Settings, stop: asyncio.Event, server: SystemServer) -> int:
    await asyncio.to_thread(import_engine, settings)
    runtime = DynamoRuntime(
        settings.runtime,
        publishes_metrics=True,
        reader_stall_timeout_s=settings.reader_stall_timeout_s,
        cancel_grace_s=settings.abort_timeout_s + 1,
    )
    server.subject = worker = Worker(settings, build_engine(settings), runtime)

    def on_ready() -> None:
        log.info("health and metrics on %s", server.url)
        gc.freeze()  # what has been loaded stays; the collector need not look at it again
        notify(f"READY=1\nSTATUS=health on {server.url}")

    return await exit_code(worker.run(stop, on_ready), profile_directory(settings))


class _Open(NamedTuple):
    """A worker that has begun to serve: where, under whose orders, and how it is probed."""

    endpoint: Endpoint
    controller: Controller
    probe: Probe


class Worker:
    """One engine, one role, one runtime, from start to stop. What the system server asks of it can be asked any time.

    A node of an engine that is spread over machines, and not its leader, has the engine only: nobody finds it.
    """

    def __init__(self, settings: Settings, engine: Engine, runtime: Runtime) -> None:
        self._settings = settings
        self._engine = engine
        self._runtime = runtime
        self._role = role_of(settings, engine.capabilities)
        self.observed = WorkerMetrics(self._role)
        self.gate = Gate(settings.max_in_flight)
        self._limits = RequestLimits(
            request_timeout_s=settings.request_timeout_s,
            abort_timeout_s=settings.abort_timeout_s,
            flush_interval_s=settings.flush_interval_ms / 1000,
        )
        self._role_service: RoleService | None = None
        self._info: EngineInfo | None = None
        self._open: _Open | None = None
        self._follower_events = FollowerEvents()
        self._sources = [
            TimedScrape("the engine", lambda: asyncio.to_thread(engine.metrics), METRICS_S),
            TimedScrape("the runtime", runtime.metrics, METRICS_S),
        ]
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.observed.in_flight.set_function(lambda: self.gate.in_flight)

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Serve until `stop` is set, then drain. Raises ConfigError, or the scope-"worker" error that ended it."""
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(send_heartbeats(stop.set), name="heartbeat")]
        try:
            starting = asyncio.create_task(self._start(), name="start")
            stopping = asyncio.create_task(stop.wait(), name="stop")
            tasks += [starting, stopping]
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                on_ready()
                await self._serve(stopping)
        finally:
            if stop.is_set():  # otherwise the last words are about what went wrong
                _tell("ending what it serves")
            await self._runtime.shutdown()
            await self._close_role()
            await _bounded("the engine did not stop", self._engine.stop(), self._settings.abort_timeout_s)
            await _cancel(tasks)
            await self._close_role()  # a start that was cut short may have opened it meanwhile
            for source in self._sources:
                source.close()

    def health(self) -> Health:
        """See `Subject.health`."""
        state = self._state()
        return Health(
            ready=state == "serving",
            state=state,
            in_flight=self.gate.in_flight,
            model=self._info.model_name if self._info is not None else None,
            role=self._role,
            engine=self._settings.engine,
        )

    async def metrics(self) -> str:
        """See `Subject.metrics`."""
        others = self._sources if self._info is not None else []
        return join([self.observed.render(), *await asyncio.gather(*(source.text() for source in others))])

    def control(self) -> Controller | None:
        """See `Operated.control`."""
        if self._info is not None and not self._info.leader:
            raise Unsupported("this node follows another in its engine; orders go to the leader")
        return self._open.controller if self._open is not None else None

    def count_command(self, command: str, outcome: str, seconds: float) -> None:
        """See `Operated.count_order`."""
        self.observed.ordered(command, outcome, seconds)

    def _state(self) -> State:
        if self._fatal.done() or self.gate.state is GateState.DRAINING:
            return "draining"
        if self._info is None or (self._open is None and self._info.leader):
            return "starting"
        if self._open is None or self._open.controller.registration.registered:
            return "serving"
        return "paused" if self.gate.state is GateState.PAUSED else "unhealthy"

    async def _close_role(self) -> None:
        role_service, self._role_service = self._role_service, None
        if role_service is not None:
            await _bounded("what the role held did not close", role_service.close(), LAST_WORDS_S)

    async def _start(self) -> None:
        """Bring everything up, in time."""
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                info = await self._engine.start()
                if info.leader or info.group is not None:
                    await self._runtime.start()
                if info.leader:
                    self._open = await self._open_to_all(info)
                elif info.group is not None:
                    path = node_path(self._settings, self._role, info.group)
                    await self._runtime.serve(path, self._follower_events.service)
                self._info = info
        except TimeoutError:
            raise EngineDead(f"the start took longer than {self._settings.start_timeout_s:g} s") from None
        self.observed.healthy.set(True)
        what = self._role if info.leader else "a node that follows"
        log.info("serving %s as %s on the %s engine", info.model_name, what, self._settings.engine)

    async def _open_to_all(self, info: EngineInfo) -> _Open:
        """Serve the endpoint, see that the role works, and only then be found."""
        tracker = RequestTracker(self.gate, self._limits, self.observed, self._role, self._fail)
        probe_tracker = RequestTracker(Gate(1), self._limits, self.observed, "canary", self._fail)
        role_context = RoleContext(self._settings, self._engine, info, tracker, probe_tracker)
        role_service = self._role_service = await build_role(self._role, role_context)
        self.observed.show_transfers(
            role_service.producer.rooms if role_service.producer else None, role_service.consumer
        )
        if role_service.shape is not None:
            await self._runtime.serve(kv_path(self._settings, self._role), kv_service(role_service.shape))
            await refuse_unlike_peers(self._runtime, self._settings, self._role, role_service.shape)
        endpoint = await self._runtime.serve(path_of(self._settings, self._role), role_service.service)
        problem = await try_probe(role_service.probe, self._settings.canary_timeout_s)
        if problem is not None:
            raise EngineDead(f"the first probe failed: {problem}")
        await endpoint.register_model(announce(self._role, role_context, role_service))
        registration = DiscoveryRegistration(endpoint, self.gate, LAST_WORDS_S)
        controller = Controller(self._engine, registration, self.gate, self._settings.command_timeout_s, self._fail)
        return _Open(endpoint, controller, role_service.probe)

    async def _serve(self, stopping: asyncio.Task[bool]) -> None:
        """Serve until told to stop or until something fails that a restart must mend, then leave."""
        probing = [self._guard("canary", self._canary(self._open).run())] if self._open is not None else []
        guards = [*probing, *self._guards()]
        try:
            await self._first_of(stopping)
            for guard in probing:
                guard.cancel()  # it must not bring a worker back that is leaving
            await self._leave()
        finally:
            await _cancel(guards)
        if self._fatal.done():
            self._fatal.result()

    def _guards(self) -> list[asyncio.Task[Any]]:
        stall_timeout_s, opened = self._settings.stall_timeout_s, self._open
        if opened is None:
            return [
                self._guard("watchdog", watch(self._engine, stall_timeout_s)),
                self._guard("readings", self._read_engine()),
            ]
        return [
            self._guard("watchdog", watch(self._engine, stall_timeout_s, lambda: opened.controller.suspended)),
            self._guard("readings", self._read_engine()),
            self._guard("listing", self._watch_registration(opened.endpoint, opened.controller.registration)),
            *self._listeners(opened.endpoint),
        ]

    def _listeners(self, endpoint: Endpoint) -> list[asyncio.Task[Any]]:
        """Listen to the other nodes of this engine, if it has any."""
        if self._info is None or self._info.group is None:
            return []
        path = node_path(self._settings, self._role, self._info.group)
        return [self._guard("nodes", Listener(self._runtime, path, endpoint.publish).run())]

    def _canary(self, opened: _Open) -> Canary:
        registration = opened.controller.registration

        async def on_change(healthy: bool, problem: str) -> None:
            self.observed.healthy.set(healthy)
            # A worker that cannot leave discovery, or come back, is of no use: the failure ends it.
            await (registration.register if healthy else registration.deregister)(DeregisterReason.UNHEALTHY)

        return Canary(
            opened.probe,
            lambda: self.gate.in_flight > 0,
            on_change,
            self._settings.canary_interval_s,
            self._settings.canary_timeout_s,
            self._settings.stall_timeout_s,
            lambda: opened.controller.suspended,
        )

    async def _leave(self) -> None:
        """Leave discovery, let requests finish for `drain_timeout_s`, fail the rest so that they move elsewhere.

        A failure, before or meanwhile, cuts it short.
        """
        self.gate.drain()
        self.observed.healthy.set(False)
        if self._open is not None:
            self._open.controller.close()
            _tell("leaving discovery")
            await _bounded("could not leave discovery", self._open.controller.registration.aclose(), LAST_WORDS_S)
        log.info("draining %d requests for up to %g s", self.gate.in_flight, self._settings.drain_timeout_s)
        _tell(f"draining {self.gate.in_flight} requests")
        idle = asyncio.create_task(self._idle(self._settings.drain_timeout_s))
        await self._first_of(idle)
        await _cancel([idle])
        if self.gate.in_flight:
            error = self._fatal.exception() if self._fatal.done() else None
            self.gate.fire_all(error if isinstance(error, BatonError) else Draining("this worker is shutting down"))
            await self.gate.idle(self._settings.abort_timeout_s + 1)

    async def _idle(self, timeout_s: float) -> bool:
        """Wait until no request runs and nothing is held for other workers."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        idle = await self.gate.idle(timeout_s)
        return idle and (self._role_service is None or await self._role_service.drain(max(0.0, deadline - clock())))

    async def _first_of(self, task: asyncio.Task[bool]) -> None:
        """Wait for `task`, or for a failure that ends the worker."""
        reasons: list[asyncio.Future[Any]] = [task, self._fatal]
        await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)

    def _guard(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[Any]:
        """Run `work` beside the requests; its failure is the worker's."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._on_guard_done)
        return task

    async def _watch_registration(self, endpoint: Endpoint, registration: DiscoveryRegistration) -> None:
        """Look whether discovery has what it should have. It forgets who was frozen for too long, and nobody tells."""
        missed = 0
        while missed < REGISTRATION_CHECKS:
            await asyncio.sleep(self._settings.canary_interval_s)
            missed = missed + 1 if registration.registered and not endpoint.is_registered else 0
        raise EngineDead("discovery has lost this worker; a restart brings it back")

    async def _read_engine(self) -> None:
        async with aclosing(self._engine.readings()) as readings:
            async for reading in readings:
                if isinstance(reading, LoadSnapshot):
                    self.observed.load(reading)
                if self._open is not None:
                    self._open.endpoint.publish(reading)
                elif self._info is not None and self._info.group is not None:
                    self._follower_events.publish(reading)

    def _fail(self, error: BatonError) -> None:
        if not self._fatal.done():
            self._fatal.set_exception(error)
            self._fatal.exception()  # marked as read: when the start fails, nobody waits for it

    def _on_guard_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error if isinstance(error, BatonError) else EngineDead(f"{task.get_name()}: {error!r}"))


async def _bounded(complaint: str, work: Coroutine[Any, Any, None], limit_s: float) -> None:
    """Do `work` on the way out: what fails or takes too long is complained of, and left."""
    try:
        await asyncio.wait_for(work, limit_s)
    except Exception as problem:  # noqa: BLE001 - we leave all the same
        log.warning("%s: %r", complaint, problem)


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    """End `tasks`. One that misses a cancellation, as `wait_for` does when its work ends just then, gets another."""
    left = set(tasks)
    for _ in range(CANCEL_TRIES):
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=1.0)
        if not left:
            return
    log.warning("did not end when told to: %s", ", ".join(sorted(task.get_name() for task in left)))


def _tell(doing: str) -> None:
    """Say what a worker that stops is doing, so that who waits for it knows what for."""
    log.debug("%s", doing)
    notify(f"STATUS={doing}")
