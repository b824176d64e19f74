"""The global router process: finds the pools of its plan, serves as if it were their workers, and follows the plan."""

import asyncio
import gc
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from baton.config.directories import profile_directory
from baton.config.settings import Settings
from baton.control.controller import Controller
from baton.control.http.schemas import Health, State
from baton.control.http.server import SystemServer
from baton.errors import BatonError, ConfigError, Draining, EngineDead, InvalidRequest
from baton.metrics.exposition import TimedScrape, join
from baton.models.directory import read_config
from baton.ports.runtime import Endpoint, ModelCard, Runtime, Service, Wire
from baton.process.exit_codes import exit_code
from baton.process.signals import stop_on_signals
from baton.request.gate import Gate, GateState
from baton.request.tracker import RequestLimits, RequestTracker
from baton.router.forward import Forwarder
from baton.router.metrics import RouterMetrics
from baton.router.plan import PoolRole
from baton.router.routing_table import RoutingTable
from baton.router.topology_file import read_topology
from baton.runtimes.dynamo.runtime import DynamoRuntime
from baton.status.sd_notify import notify, send_heartbeats

log = logging.getLogger(__name__)

Stamp = tuple[int, int, int]

LOOK_S = 0.1
RELOAD_S = 1.0
REGISTRATION_CHECKS = 3
METRICS_S = 3.0
LAST_WORDS_S = 5.0
BLOCK_SIZE = 16
DEFAULT_CONTEXT = 8192

_ENDPOINTS: dict[PoolRole, str] = {
    "prefill": "prefill_generate",
    "decode": "decode_generate",
    "aggregated": "generate",
}
_NEEDS: dict[PoolRole, tuple[tuple[str, ...], ...]] = {"prefill": (("decode",),), "decode": (("prefill",),)}


def run_router(settings: Settings) -> int:
    """Run a global router until it is told to stop; return its exit code. Its model has been prepared."""
    import uvloop

    return uvloop.run(_main(settings))


async def _main(settings: Settings) -> int:
    stop = stop_on_signals(drain_timeout_s=settings.drain_timeout_s)
    server = SystemServer(settings.system_host, settings.system_port, accepts_commands=False)
    await server.start()
    runtime = DynamoRuntime(
        settings.runtime, publishes_metrics=True, reader_stall_timeout_s=settings.reader_stall_timeout_s
    )
    server.subject = router = GlobalRouter(settings, runtime)

    def on_ready() -> None:
        log.info("health and metrics on %s", server.url)
        gc.freeze()  # what has been loaded stays; the collector need not look at it again
        notify(f"READY=1\nSTATUS=health on {server.url}")

    try:
        return await exit_code(router.run(stop, on_ready), profile_directory(settings))
    finally:
        await server.aclose()


class GlobalRouter:
    """One router, from start to stop. What the system server asks of it can be asked any time."""

    def __init__(self, settings: Settings, runtime: Runtime) -> None:
        self._settings = settings
        self._runtime = runtime
        self._file = Path(settings.topology)
        self._stamp: Stamp | None = None
        self.routing = RoutingTable(runtime)
        self.observed = RouterMetrics(self.routing.routers)
        self.gate = Gate(sys.maxsize)
        self._endpoints: list[Endpoint] = []
        self._source = TimedScrape("the runtime", runtime.metrics, METRICS_S)

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Serve until `stop` is set, then drain. Raises ConfigError or EngineDead."""
        beating = asyncio.create_task(send_heartbeats(stop.set), name="heartbeat")
        try:
            if await _unless(stop, self._start()):
                on_ready()
                await _unless(stop, self._look_after())
            await self._leave()
        finally:
            await self._runtime.shutdown()
            beating.cancel()
            self._source.close()

    def health(self) -> Health:
        """See `Subject.health`. Healthy means that every role has a pool with a worker."""
        state: State = "serving"
        if self.gate.state is GateState.DRAINING:
            state = "draining"
        elif not self._endpoints:
            state = "starting"
        elif self._empty_roles():
            state = "unhealthy"
        return Health(
            ready=state == "serving",
            state=state,
            in_flight=self.gate.in_flight,
            model=self._settings.name,
            role="router",
        )

    async def metrics(self) -> str:
        """See `Subject.metrics`."""
        return join([self.observed.render(), await self._source.text() if self._endpoints else ""])

    def control(self) -> Controller | None:
        """See `Operated.control`: a router takes no orders; its plan is changed by changing the file."""
        return None

    def count_command(self, command: str, outcome: str, seconds: float) -> None:
        """See `Operated.count_order`."""

    async def _start(self) -> None:
        """Adopt the plan, wait for workers, and only then be found."""
        self._stamp = _stamp(self._file)
        topology = await asyncio.to_thread(read_topology, self._file, self._settings.namespace)
        await self._runtime.start()
        await self.routing.adopt(topology.plan)
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                while missing := self._empty_roles():
                    notify(f"STATUS=waiting for workers: {', '.join(missing)}")
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            wanted = ", ".join(
                state.pool.path for each in self.routing.routers() if each.role in missing for state in each.states
            )
            raise EngineDead(
                f"no worker for {' and '.join(missing)} within {self._settings.start_timeout_s:g} s;"
                f" looked for {wanted}"
            ) from None
        limits = RequestLimits(request_timeout_s=self._settings.request_timeout_s)
        endpoints = [await self._serve(router.role, limits) for router in self.routing.routers()]
        for role, endpoint in endpoints:
            await endpoint.register_model(self._card(role))
        self._endpoints = [endpoint for _, endpoint in endpoints]
        log.info("routing %s by %s", self._settings.name, self._file)

    async def _serve(self, role: PoolRole, limits: RequestLimits) -> tuple[PoolRole, Endpoint]:
        tracker = RequestTracker(self.gate, limits, self.observed, role, _log_fatal)
        forwarder = Forwarder(lambda: self.routing.router(role), tracker, self.observed)
        path = f"{self._settings.namespace}.router.{_ENDPOINTS[role]}"
        return role, await self._runtime.serve(path, Service(forwarder.generate, _as_is, _as_is))

    def _card(self, role: PoolRole) -> ModelCard:
        model = Path(self._settings.model)
        return ModelCard(
            name=self._settings.name,
            directory=str(model),
            surfaces=frozenset({"prefill"}) if role == "prefill" else frozenset({"chat", "completions"}),
            worker_type=role,
            needs=_NEEDS.get(role, ()),
            context_length=read_config(model).max_position_embeddings or DEFAULT_CONTEXT,
            block_size=BLOCK_SIZE,
            total_blocks=0,
            max_running=0,
        )

    def _empty_roles(self) -> list[str]:
        """Return the roles without a worker in any pool."""
        routers = self.routing.routers()
        return [router.role for router in routers if not any(state.client.instances() for state in router.states)]

    async def _look_after(self) -> None:
        """Follow the plan's file, and see that discovery has this router. Raises EngineDead once it has not.

        Discovery forgets who was frozen for too long, and nobody tells.
        """
        missed = 0
        while missed < REGISTRATION_CHECKS:
            await asyncio.sleep(RELOAD_S)
            missed = 0 if all(endpoint.is_registered for endpoint in self._endpoints) else missed + 1
            if (now := _stamp(self._file)) not in (self._stamp, None):
                self._stamp = now
                await self._change_plan()
        raise EngineDead("discovery has lost this router; a restart brings it back")

    async def _change_plan(self) -> None:
        """Adopt the plan anew; one that is not valid changes nothing."""
        try:
            topology = await asyncio.to_thread(read_topology, self._file, self._settings.namespace)
            if set(topology.plan.roles) != {router.role for router in self.routing.routers()}:
                raise ConfigError("mode: a router that runs cannot change it; start another one")
            await self.routing.adopt(topology.plan)
        except BatonError as error:
            log.error("the plan has changed and is not taken: %s", error.message)
            self.observed.reloaded("refused")
        else:
            log.info("the plan has changed and is in force")
            self.observed.reloaded("adopted")

    async def _leave(self) -> None:
        """Leave discovery, let requests finish for `drain_timeout_s`, fail the rest so that they move elsewhere."""
        self.gate.drain()
        for endpoint in self._endpoints:
            try:
                await asyncio.wait_for(endpoint.deregister(), LAST_WORDS_S)
            except Exception as problem:  # noqa: BLE001 - we leave all the same
                log.warning("could not leave discovery: %r", problem)
        notify(f"STATUS=draining {self.gate.in_flight} requests")
        if not await self.gate.idle(self._settings.drain_timeout_s):
            self.gate.fire_all(Draining("this router is shutting down"))
            await self.gate.idle(LAST_WORDS_S)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do `work`, unless told to stop first; return whether it was done. Raises what it raises."""
    doing, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([doing, stopping], return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
        return doing.done()
    finally:
        doing.cancel()
        stopping.cancel()
        await asyncio.wait([doing, stopping])


def _as_is(wire: object) -> Wire:
    if not isinstance(wire, dict):
        raise InvalidRequest(f"expected an object, got {type(wire).__name__}")
    return wire


def _stamp(file: Path) -> Stamp | None:
    """Return what changes when `file` does; None while it is not there, as when an editor replaces it."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _log_fatal(error: BatonError) -> None:
    """A worker's engine has died: that ends the worker, not its router."""
    log.debug("a worker failed: %s", error.message)
