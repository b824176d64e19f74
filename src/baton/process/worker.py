"""The worker process: one engine, one role, one runtime, on the skeleton of `service_process.py`."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, NamedTuple

from baton.config.settings import Settings
from baton.control.controller import Controller
from baton.control.discovery import DiscoveryRegistration
from baton.control.http.command_table import supported_paths
from baton.control.http.schemas import Health, State
from baton.engines.registry import build_engine, import_engine
from baton.errors import EngineDead, Unsupported
from baton.health.canary import Canary, Probe, try_probe
from baton.health.watchdog import watch
from baton.metrics.exposition import TimedScrape, add_labels, join
from baton.metrics.worker import WorkerMetrics
from baton.ports.engine import Engine, EngineInfo
from baton.ports.runtime import Endpoint, Runtime
from baton.process.follower_events import FollowerEvents, FollowerSubscriber, follower_path
from baton.process.kv_compatibility import kv_path, kv_service, refuse_incompatible_peers
from baton.process.location_service import serve_location, system_url
from baton.process.process_reports import ProcessReports, ProcessStatus
from baton.process.registration_watch import RegistrationWatch
from baton.process.role_context import RoleContext
from baton.process.roles import RoleService, announce, build_role, path_of, role_of
from baton.process.service_process import (
    DISCOVERY_TIMEOUT_S,
    ServiceProcess,
    bounded,
    run_service,
)
from baton.protocol.events import LoadSnapshot
from baton.request.gate import Gate, GateState
from baton.request.tracker import RequestLimits, RequestTracker
from baton.runtimes.dynamo.runtime import DynamoRuntime
from baton.timelines.reports import AboutReply, TimelinesReply

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
SCRAPE_TIMEOUT_S = 3.0
REGISTRATION_CHECKS = 2


def run_worker(settings: Settings) -> int:
    """Run one worker until it is stopped; return its exit code. Its model has been prepared."""
    import uvloop

    async def build(settings: Settings) -> Worker:
        await asyncio.to_thread(import_engine, settings)
        runtime = DynamoRuntime(
            settings.runtime,
            publishes_metrics=True,
            reader_stall_timeout_s=settings.reader_stall_timeout_s,
            cancel_grace_s=settings.abort_timeout_s + 1,
        )
        return Worker(settings, build_engine(settings), runtime)

    return uvloop.run(run_service(settings, build, settings.accepts_commands))


class _Registered(NamedTuple):
    """What exists once a worker is registered: its endpoint, its controller and its probe."""

    endpoint: Endpoint
    controller: Controller
    probe: Probe


class Worker:
    """One worker, from start to stop. The system server may call it at any time.

    A follower, a node of an engine that is spread over machines, runs the engine only: it is not in discovery.
    """

    def __init__(self, settings: Settings, engine: Engine, runtime: Runtime) -> None:
        self._settings = settings
        self._engine = engine
        self._runtime = runtime
        self._role = role_of(settings, engine.capabilities)
        self.observed = WorkerMetrics(self._role, settings.first_name, settings.engine)
        self._reports = ProcessReports(settings, self._role, settings.engine)
        self._load: dict[int, LoadSnapshot] = {}
        self.gate = Gate(settings.max_in_flight)
        self._process = ServiceProcess(
            "worker",
            runtime,
            self.gate,
            drain_timeout_s=settings.drain_timeout_s,
            end_timeout_s=settings.abort_timeout_s + 1,
        )
        self._limits = RequestLimits(
            request_timeout_s=settings.request_timeout_s,
            abort_timeout_s=settings.abort_timeout_s,
            flush_interval_s=settings.flush_interval_ms / 1000,
        )
        self._role_service: RoleService | None = None
        self._info: EngineInfo | None = None
        self._registered: _Registered | None = None
        self._canary_task: asyncio.Task[Any] | None = None
        self._follower_events = FollowerEvents()
        self._scrapes = [
            TimedScrape("the engine", self._engine_metrics, SCRAPE_TIMEOUT_S),
            TimedScrape("the runtime", runtime.metrics, SCRAPE_TIMEOUT_S),
        ]
        self.observed.in_flight.read(lambda: self.gate.in_flight)
        self.observed.steps.read(lambda: engine.progress().steps)

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """See `Runnable.run`."""
        await self._process.run(self, stop, on_ready)

    # Called by the system server

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
        scrapes = self._scrapes if self._info is not None else []
        return join([self.observed.render(), *await asyncio.gather(*(scrape.text() for scrape in scrapes))])

    async def _engine_metrics(self) -> str:
        """Return the engine's metrics with the labels that dashboards of Dynamo select by."""
        text = await asyncio.to_thread(self._engine.metrics)
        namespace, component, endpoint = path_of(self._settings, self._role).split(".", 2)
        model = self._info.model_name if self._info is not None else ""
        return add_labels(
            text,
            {
                "dynamo_namespace": namespace,
                "dynamo_component": component,
                "dynamo_endpoint": endpoint,
                "model": model,
                "model_name": model,
            },
        )

    def control(self) -> Controller | None:
        """See `Controlled.control`."""
        if self._info is not None and not self._info.leader:
            raise Unsupported("this node is a follower in its engine; send commands to the leader")
        return self._registered.controller if self._registered is not None else None

    def about(self) -> AboutReply:
        """See `Controlled.about`."""
        producer = self._role_service.producer if self._role_service is not None else None
        consumer = self._role_service.consumer if self._role_service is not None else None
        return self._reports.about(
            ProcessStatus(
                health=self._state(),
                in_flight=self.gate.in_flight,
                model=self._info.model_name if self._info is not None else None,
                capabilities=self._engine.capabilities,
                load=[self._load[rank] for rank in sorted(self._load)],
                rooms=producer.rooms.open if producer is not None else {},
                transfers=consumer.bytes_by_transport if consumer is not None else {},
                commands=supported_paths(self._engine.capabilities) if self._registered is not None else (),
            )
        )

    def timelines(self, after: int, limit: int) -> TimelinesReply:
        """See `Controlled.timelines`."""
        return self._reports.page(after, limit, self._info.model_name if self._info is not None else None)

    def count_command(self, command: str, outcome: str, seconds: float) -> None:
        """See `Controlled.count_command`."""
        self.observed.count_command(command, outcome, seconds)

    def _state(self) -> State:
        if self._process.failed or self.gate.state is GateState.DRAINING:
            return "draining"
        if self._info is None or (self._registered is None and self._info.leader):
            return "starting"
        if self._registered is None or self._registered.controller.registered:
            return "serving"
        return "paused" if self.gate.state is GateState.PAUSED else "unhealthy"

    # Called by the process skeleton

    async def _start_engine(self) -> EngineInfo:
        began = time.monotonic()
        info = await self._engine.start()
        self.observed.model_load_seconds.set(time.monotonic() - began)
        return info

    async def start(self) -> None:
        """See `ServiceSteps.start`."""
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                info = await self._start_engine()
                if info.leader or info.group is not None:
                    await self._runtime.start()
                    await serve_location(self._runtime.serve, self._settings, self._role, system_url(self._settings))
                if info.leader:
                    self._registered = await self._register(info)
                elif info.group is not None:
                    path = follower_path(self._settings, self._role, info.group)
                    await self._runtime.serve(path, self._follower_events.service)
                self._info = info
        except TimeoutError:
            raise EngineDead(f"the start took longer than {self._settings.start_timeout_s:g} s") from None
        self.observed.healthy.set(True)
        role = self._role if info.leader else "a follower"
        names = ", ".join((info.model_name, *self._settings.served_names[1:]))
        log.info("serving %s as %s on the %s engine", names, role, self._settings.engine)

    def start_guards(self) -> None:
        """See `ServiceSteps.start_guards`."""
        guard, registered, stall_timeout_s = self._process.guard, self._registered, self._settings.stall_timeout_s
        guard("readings", self._publish_readings())
        if registered is None:
            guard("watchdog", watch(self._engine, stall_timeout_s))
            return
        endpoint, controller, _ = registered
        guard("watchdog", watch(self._engine, stall_timeout_s, lambda: controller.suspended))
        self._canary_task = guard("canary", self._canary(registered).run())

        def is_lost() -> bool:
            return controller.registered and not endpoint.is_registered

        async def restore() -> None:
            await controller.restore(self._runtime.restore)

        watch_entry = RegistrationWatch(
            "worker",
            is_lost,
            restore,
            self._process.retire,
            interval_s=self._settings.canary_interval_s,
            checks=REGISTRATION_CHECKS,
        )
        guard("registration", watch_entry.run())
        if self._info is not None and self._info.group is not None:
            path = follower_path(self._settings, self._role, self._info.group)
            guard("followers", FollowerSubscriber(self._runtime, path, endpoint.publish).run())

    async def leave_discovery(self) -> None:
        """See `ServiceSteps.leave_discovery`."""
        if self._canary_task is not None:
            self._canary_task.cancel()  # it must not set the worker healthy again
        self.observed.healthy.set(False)
        if self._registered is not None:
            await bounded("could not leave discovery", self._registered.controller.aclose(), DISCOVERY_TIMEOUT_S)

    async def idle(self, timeout_s: float) -> bool:
        """See `ServiceSteps.idle`: no request runs, and no KV is kept for other workers."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        idle = await self.gate.idle(timeout_s)
        return idle and (self._role_service is None or await self._role_service.drain(max(0.0, deadline - clock())))

    async def close(self) -> None:
        """See `ServiceSteps.close`."""
        role_service, self._role_service = self._role_service, None
        if role_service is not None:
            await bounded("the role did not close", role_service.close(), CLOSE_TIMEOUT_S)
        await bounded("the engine did not stop", self._engine.stop(), self._settings.abort_timeout_s)
        for scrape in self._scrapes:
            scrape.close()
        await self._reports.aclose()

    async def _register(self, info: EngineInfo) -> _Registered:
        """Serve the endpoint, probe the role, and only then register the model."""
        tracker = RequestTracker(
            self.gate,
            self._limits,
            self.observed,
            self._role,
            self._process.fail,
            self._reports.timelines,
            self.observed.token_gaps.observe,
        )
        probe_tracker = RequestTracker(Gate(1), self._limits, self.observed, "canary", self._process.fail)
        role_context = RoleContext(self._settings, self._engine, info, tracker, probe_tracker)
        role_service = self._role_service = await build_role(self._role, role_context)
        rooms = role_service.producer.rooms if role_service.producer else None
        self.observed.show_transfers(rooms, role_service.consumer)
        if role_service.media is not None and role_service.media.store is not None:
            self.observed.show_embeddings(role_service.media.store)
        if role_service.shape is not None:
            await self._runtime.serve(kv_path(self._settings, self._role), kv_service(role_service.shape))
            await refuse_incompatible_peers(self._runtime, self._settings, self._role, role_service.shape)
        endpoint = await self._runtime.serve(path_of(self._settings, self._role), role_service.service)
        problem = await try_probe(role_service.probe, self._settings.canary_timeout_s)
        if problem is not None:
            raise EngineDead(f"the first probe failed: {problem}")
        await endpoint.register_model(announce(self._role, role_context, role_service))
        registration = DiscoveryRegistration(endpoint, DISCOVERY_TIMEOUT_S)
        for adapter in info.adapters:
            await registration.register_adapter(adapter)
        controller = Controller(
            self._engine, registration, self.gate, self._settings.command_timeout_s, self._process.fail
        )
        return _Registered(endpoint, controller, role_service.probe)

    def _canary(self, registered: _Registered) -> Canary:
        async def on_change(healthy: bool) -> None:
            self.observed.healthy.set(healthy)
            # A worker that cannot leave discovery, or register again, is of no use: the failure ends it.
            await registered.controller.set_healthy(healthy)

        return Canary(
            registered.probe,
            lambda: self.gate.in_flight > 0,
            on_change,
            self._settings.canary_interval_s,
            self._settings.canary_timeout_s,
            self._settings.stall_timeout_s,
            lambda: registered.controller.suspended,
        )

    async def _publish_readings(self) -> None:
        async with aclosing(self._engine.readings()) as readings:
            async for reading in readings:
                if isinstance(reading, LoadSnapshot):
                    self.observed.load(reading)
                    self._load[reading.dp_rank] = reading
                if self._registered is not None:
                    self._registered.endpoint.publish(reading)
                elif self._info is not None and self._info.group is not None:
                    self._follower_events.publish(reading)
