"""The global router process: finds the pools of its plan, serves in their place, and reloads the plan when it changes.

It runs on the skeleton of `service_process.py`.
"""

import asyncio
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from baton.config.settings import Settings
from baton.control.controller import Controller
from baton.control.http.schemas import Health, State
from baton.errors import BatonError, ConfigError, EngineDead, InvalidRequest, Unsupported
from baton.metrics.exposition import TimedScrape, join
from baton.models.directory import read_config
from baton.ports.runtime import Endpoint, ModelCard, Runtime, Service, Wire
from baton.process.location_service import serve_location, system_url
from baton.process.process_reports import ProcessReports, ProcessStatus
from baton.process.registration_watch import RegistrationWatch
from baton.process.roles import chat_format
from baton.process.service_process import (
    DISCOVERY_TIMEOUT_S,
    ServiceProcess,
    bounded,
    run_service,
)
from baton.request.gate import Gate, GateState
from baton.request.tracker import RequestLimits, RequestTracker
from baton.router.forward import Forwarder
from baton.router.metrics import RouterMetrics
from baton.router.plan import Plan, PoolRole
from baton.router.routing_table import RoutingTable
from baton.router.topology_file import read_topology
from baton.runtimes.dynamo.runtime import DynamoRuntime
from baton.status.sd_notify import notify
from baton.timelines.reports import AboutReply, TimelinesReply

log = logging.getLogger(__name__)

Stamp = tuple[int, int, int]

POLL_INTERVAL_S = 0.1
CHECK_INTERVAL_S = 1.0
REGISTRATION_CHECKS = 3
SCRAPE_TIMEOUT_S = 3.0
END_TIMEOUT_S = 5.0
BLOCK_SIZE = 16
DEFAULT_CONTEXT = 8192

_ENDPOINTS: dict[PoolRole, str] = {
    "prefill": "prefill_generate",
    "decode": "decode_generate",
    "aggregated": "generate",
}
_NEEDS: dict[PoolRole, tuple[tuple[str, ...], ...]] = {"prefill": (("decode",),), "decode": (("prefill",),)}


def run_router(settings: Settings) -> int:
    """Run a global router until it is stopped; return its exit code. Its model has been prepared."""
    import uvloop

    async def build(settings: Settings) -> GlobalRouter:
        runtime = DynamoRuntime(
            settings.runtime,
            publishes_metrics=True,
            reader_stall_timeout_s=settings.reader_stall_timeout_s,
            subscribes=True,
        )
        return GlobalRouter(settings, runtime)

    return uvloop.run(run_service(settings, build, settings.accepts_commands))


class GlobalRouter:
    """One router, from start to stop. The system server may call it at any time."""

    def __init__(self, settings: Settings, runtime: Runtime) -> None:
        self._settings = settings
        self._runtime = runtime
        self._file = Path(settings.topology)
        self._stamp: Stamp | None = None
        self.routing = RoutingTable(runtime)
        self.observed = RouterMetrics(self.routing.routers, settings.first_name)
        self._reports = ProcessReports(settings, "router")
        self.gate = Gate(sys.maxsize)
        self.observed.in_flight.read(lambda: self.gate.in_flight)
        self._endpoints: list[Endpoint] = []
        self._scrape = TimedScrape("the runtime", runtime.metrics, SCRAPE_TIMEOUT_S)
        self._process = ServiceProcess(
            "router", runtime, self.gate, drain_timeout_s=settings.drain_timeout_s, end_timeout_s=END_TIMEOUT_S
        )

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """See `Runnable.run`."""
        await self._process.run(self, stop, on_ready)

    # Called by the system server

    def health(self) -> Health:
        """See `Subject.health`. A role without workers makes the router unhealthy."""
        state = self._state()
        return Health(
            ready=state == "serving",
            state=state,
            in_flight=self.gate.in_flight,
            model=self._settings.first_name,
            role="router",
        )

    async def metrics(self) -> str:
        """See `Subject.metrics`."""
        return join([self.observed.render(), await self._scrape.text() if self._endpoints else ""])

    def control(self) -> Controller | None:
        """See `Controlled.control`. A router takes no commands; its plan is changed by editing the file."""
        raise Unsupported("a router takes no commands; change its topology file instead")

    def about(self) -> AboutReply:
        """See `Controlled.about`."""
        return self._reports.about(ProcessStatus(health=self._state(), in_flight=self.gate.in_flight))

    def timelines(self, after: int, limit: int) -> TimelinesReply:
        """See `Controlled.timelines`."""
        return self._reports.page(after, limit, None)

    def count_command(self, command: str, outcome: str, seconds: float) -> None:
        """See `Controlled.count_command`."""

    def _state(self) -> State:
        if self._process.failed or self.gate.state is GateState.DRAINING:
            return "draining"
        if not self._endpoints:
            return "starting"
        return "unhealthy" if self._empty_roles() else "serving"

    # Called by the process skeleton

    async def start(self) -> None:
        """See `ServiceSteps.start`. The router registers when every role has a worker."""
        self._stamp = _stamp(self._file)
        plan = await self._read_plan()
        await self._runtime.start()
        await serve_location(self._runtime.serve, self._settings, "router", system_url(self._settings))
        await self.routing.adopt(plan)
        await self._wait_for_workers()
        limits = RequestLimits(request_timeout_s=self._settings.request_timeout_s)
        endpoints = [await self._serve(router.role, limits) for router in self.routing.routers()]
        for role, endpoint in endpoints:
            await endpoint.register_model(self._card(role))
        self._endpoints = [endpoint for _, endpoint in endpoints]
        log.info("routing %s by %s", ", ".join(self._settings.served_names), self._file)

    def start_guards(self) -> None:
        """See `ServiceSteps.start_guards`."""
        self._process.guard("plan", self._follow_plan())

        def is_lost() -> bool:
            draining = self.gate.state is GateState.DRAINING
            return not draining and not all(endpoint.is_registered for endpoint in self._endpoints)

        watch_entry = RegistrationWatch(
            "router",
            is_lost,
            self._runtime.restore,
            self._process.retire,
            interval_s=CHECK_INTERVAL_S,
            checks=REGISTRATION_CHECKS,
        )
        self._process.guard("registration", watch_entry.run())

    async def leave_discovery(self) -> None:
        """See `ServiceSteps.leave_discovery`."""
        for endpoint in self._endpoints:
            await bounded("could not leave discovery", endpoint.deregister(), DISCOVERY_TIMEOUT_S)

    async def idle(self, timeout_s: float) -> bool:
        """See `ServiceSteps.idle`."""
        return await self.gate.idle(timeout_s)

    async def close(self) -> None:
        """See `ServiceSteps.close`."""
        self._scrape.close()
        await self._reports.aclose()

    async def _read_plan(self) -> Plan:
        """Return the plan of the file, with the default targets of the settings. Raises ConfigError."""
        settings = self._settings
        topology = await asyncio.to_thread(read_topology, self._file, settings.namespace, settings.pool_endpoint)
        return topology.plan.with_default_targets(
            *(None if target < 0 else target for target in (settings.default_ttft_ms, settings.default_itl_ms))
        )

    async def _wait_for_workers(self) -> None:
        """Wait until every role has a worker. Raises EngineDead after `start_timeout_s`."""
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                while missing := self._empty_roles():
                    notify(f"STATUS=waiting for workers: {', '.join(missing)}")
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            paths = ", ".join(
                state.pool.path for each in self.routing.routers() if each.role in missing for state in each.states
            )
            raise EngineDead(
                f"no worker for {' and '.join(missing)} within {self._settings.start_timeout_s:g} s; looked for {paths}"
            ) from None

    async def _serve(self, role: PoolRole, limits: RequestLimits) -> tuple[PoolRole, Endpoint]:
        tracker = RequestTracker(self.gate, limits, self.observed, role, _log_fatal, self._reports.timelines)
        forwarder = Forwarder(lambda: self.routing.router(role), tracker, self.observed)
        path = f"{self._settings.namespace}.router.{_ENDPOINTS[role]}"
        return role, await self._runtime.serve(path, Service(forwarder.generate, _as_is, _as_is))

    def _card(self, role: PoolRole) -> ModelCard:
        model = Path(self._settings.model)
        return ModelCard(
            name=self._settings.first_name,
            other_names=self._settings.served_names[1:],
            directory=str(model),
            surfaces=frozenset({"prefill"}) if role == "prefill" else frozenset({"chat", "completions"}),
            worker_type=role,
            needs=self._needs(role),
            context_length=read_config(model).max_position_embeddings or DEFAULT_CONTEXT,
            block_size=BLOCK_SIZE,
            total_blocks=0,
            max_running=0,
            chat=chat_format(self._settings),
        )

    def _needs(self, role: PoolRole) -> tuple[tuple[str, ...], ...]:
        """Return the roles that must run, one of the groups; a frontend calls encode workers if a group names them."""
        groups = _NEEDS.get(role, ((),))
        if not self._settings.media.encoders or role == "decode":
            return _NEEDS.get(role, ())
        with_encoders = tuple((*group, "encode") for group in groups)
        return with_encoders if self._settings.media.local_encoding == "never" else (*with_encoders, *groups)

    def _empty_roles(self) -> list[str]:
        """Return the roles without a worker in any pool."""
        routers = self.routing.routers()
        return [router.role for router in routers if not any(state.client.instances() for state in router.states)]

    async def _follow_plan(self) -> None:
        """Reload the plan when its file changes."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if (now := _stamp(self._file)) not in (self._stamp, None):
                self._stamp = now
                await self._reload_plan()

    async def _reload_plan(self) -> None:
        """Adopt the changed plan; one that is not valid changes nothing."""
        try:
            plan = await self._read_plan()
            if set(plan.roles) != {router.role for router in self.routing.routers()}:
                raise ConfigError("mode: a router that runs cannot change it; start another one")
            await self.routing.adopt(plan)
        except BatonError as error:
            log.error("the changed plan is refused: %s", error.message)
            self.observed.reloaded("refused")
        else:
            log.info("the changed plan is in force")
            self.observed.reloaded("adopted")


def _as_is(wire: object) -> Wire:
    if not isinstance(wire, dict):
        raise InvalidRequest(f"expected an object, got {type(wire).__name__}")
    return wire


def _stamp(file: Path) -> Stamp | None:
    """Return a stamp of the content of `file`; None while it does not exist, as when an editor replaces it."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _log_fatal(error: BatonError) -> None:
    """A dead engine ends its worker, not the router."""
    log.debug("a worker failed: %s", error.message)
