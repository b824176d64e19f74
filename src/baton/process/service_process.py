"""The skeleton of a process that serves requests: system server, signals, heartbeat, start, drain, shutdown.

A worker and a global router are `ServiceSteps`; what they have in common is here.
"""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import msgspec

from baton.config.directories import control_directory, process_directory, profile_directory, shared_directory
from baton.config.load import control_token
from baton.config.settings import Settings
from baton.control.http.server import Subject, SystemServer
from baton.control.http.token_file import generate_token, published_token
from baton.control.process_entries import published_entry
from baton.errors import BatonError, ConfigError, Draining, EngineDead
from baton.ports.runtime import Runtime
from baton.process.exit_codes import exit_code
from baton.process.process_reports import own_name
from baton.process.signals import stop_on_signals
from baton.request.gate import Gate
from baton.status.sd_notify import RUNNING_REQUESTS, SYSTEM_URL, notify, send_heartbeats

log = logging.getLogger(__name__)

DISCOVERY_TIMEOUT_S = 5.0
CANCEL_TRIES = 3
# New objects before a collection. Requests make hundreds of them, which die without one.
GC_THRESHOLD = 10_000


class ServiceSteps(Protocol):
    """What a process does at each stage of its life."""

    async def start(self) -> None:
        """Start everything and register in discovery. Cancelled if the process is stopped meanwhile."""

    def start_guards(self) -> None:
        """Start the background tasks, with `ServiceProcess.guard`."""

    async def leave_discovery(self) -> None:
        """Deregister. Bounded, and never raises."""

    async def idle(self, timeout_s: float) -> bool:
        """Wait until nothing is served any more; return False if that takes longer than `timeout_s`."""

    async def close(self) -> None:
        """Free everything; the runtime has shut down. Idempotent, and valid during a start."""


class Runnable(Subject, Protocol):
    """A subject of the system server that runs until it is stopped."""

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Serve until `stop` is set, then drain. Raises ConfigError, or the scope-"worker" error that ended it."""


async def run_service(
    settings: Settings, build: Callable[[Settings], Awaitable[Runnable]], accepts_commands: bool = False
) -> int:
    """Run what `build` returns until SIGTERM; return the exit code. `/health` answers before `build` is called,
    with settings that have the port of the system server.

    Commands need the configured token, or else a generated one.
    """
    stop = stop_on_signals(drain_timeout_s=settings.drain_timeout_s)
    given = control_token(settings) if accepts_commands else ""
    token = given or generate_token() if accepts_commands else None
    server = SystemServer(settings.system_host, settings.system_port, token=token)
    await server.start()
    notify(f"{SYSTEM_URL}={server.url}")

    def on_ready() -> None:
        log.info("health and metrics on %s", server.url)
        collect_less()
        notify(f"READY=1\nSTATUS=health on {server.url}")

    try:
        with _entry(server, settings), _published(server, token) if token and not given else nullcontext():
            server.subject = subject = await build(msgspec.structs.replace(settings, system_port=server.port))
            return await exit_code(subject.run(stop, on_ready), profile_directory(settings))
    finally:
        await server.aclose()


def _entry(server: SystemServer, settings: Settings) -> AbstractContextManager[None]:
    """Return a block within which `baton ctl` finds this process by its name."""
    role = "router" if settings.topology else "worker" if settings.role == "auto" else settings.role
    try:
        return published_entry(
            process_directory(), own_name(role), server.url, discovery=shared_directory(settings.runtime)
        )
    except ConfigError:  # no home directory
        return nullcontext()


def _published(server: SystemServer, token: str) -> AbstractContextManager[None]:
    """Return a block within which `baton ctl` finds the generated token."""
    try:
        return published_token(control_directory(), server.address, server.port, token)
    except ConfigError as error:
        log.warning("commands are refused, because a generated token needs a file: %s", error.message)
        return nullcontext()


def collect_less() -> None:
    """Adapt the garbage collector to a process that has started."""
    gc.freeze()  # what has been loaded stays; the collector need not scan it again
    gc.set_threshold(GC_THRESHOLD)


class ServiceProcess:
    """Runs `ServiceSteps` on a runtime, from start to stop. Built in the event loop."""

    def __init__(
        self, name: str, runtime: Runtime, gate: Gate, *, drain_timeout_s: float, end_timeout_s: float
    ) -> None:
        self._name = name
        self._runtime = runtime
        self._gate = gate
        self._drain_timeout_s = drain_timeout_s
        self._end_timeout_s = end_timeout_s
        self._guards: list[asyncio.Task[Any]] = []
        loop = asyncio.get_running_loop()
        self._fatal: asyncio.Future[None] = loop.create_future()
        self._retired: asyncio.Future[BatonError] = loop.create_future()

    @property
    def failed(self) -> bool:
        """Whether the process ends because of a failure."""
        return self._fatal.done() or self._retired.done()

    def fail(self, error: BatonError) -> None:
        """End the process with `error`. The first error wins."""
        if not self._fatal.done():
            self._fatal.set_exception(error)
            self._fatal.exception()  # marked as retrieved: when the start fails, nothing awaits it

    def retire(self, error: BatonError) -> None:
        """Drain as for a stop, and then end the process with `error`, which a restart fixes."""
        if not self._retired.done():
            self._retired.set_result(error)

    def guard(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[Any]:
        """Run `work` beside the requests until they have drained; its failure ends the process."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._on_guard_done)
        self._guards.append(task)
        return task

    async def run(self, steps: ServiceSteps, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """See `Runnable.run`."""
        heartbeat = asyncio.create_task(send_heartbeats(stop.set), name="heartbeat")
        starting = asyncio.create_task(steps.start(), name="start")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                on_ready()
                await self._serve(steps, stopping)
        finally:
            if stop.is_set():  # otherwise the last status is the failure
                _report_status("ending what it serves")
            await self._runtime.shutdown()
            await steps.close()
            interrupted = not starting.done()
            await _cancel([heartbeat, starting, stopping])
            if interrupted:
                await steps.close()  # the start may have opened something meanwhile

    async def _serve(self, steps: ServiceSteps, stopping: asyncio.Task[bool]) -> None:
        """Serve until stopped, retired or until a failure that a restart must fix, then drain."""
        steps.start_guards()
        try:
            await self._first_of(stopping, self._retired)
            await self._drain(steps)
        finally:
            await _cancel(self._guards)
        if self._fatal.done():
            self._fatal.result()
        if self._retired.done():
            raise self._retired.result()

    async def _drain(self, steps: ServiceSteps) -> None:
        """Leave discovery, let requests finish for `drain_timeout_s`, fail the rest so that they are retried elsewhere.

        A failure, before or meanwhile, ends the wait.
        """
        self._gate.drain()
        _report_status("leaving discovery")
        await steps.leave_discovery()
        running = self._gate.in_flight
        log.info(
            "draining %d requests for up to %g s; a second signal ends them at once", running, self._drain_timeout_s
        )
        _report_status(f"draining {running} requests")
        notify(f"{RUNNING_REQUESTS}={running}")
        idle = asyncio.create_task(steps.idle(self._drain_timeout_s), name="drain")
        await self._first_of(idle)
        await _cancel([idle])
        if self._gate.in_flight:
            error = self._fatal.exception() if self._fatal.done() else None
            shutdown = Draining(f"this {self._name} is shutting down")
            self._gate.fire_all(error if isinstance(error, BatonError) else shutdown)
            await self._gate.idle(self._end_timeout_s)

    async def _first_of(self, *ends: asyncio.Future[Any]) -> None:
        """Wait for one of `ends`, or for a failure that ends the process."""
        await asyncio.wait([*ends, self._fatal], return_when=asyncio.FIRST_COMPLETED)

    def _on_guard_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error if isinstance(error, BatonError) else EngineDead(f"{task.get_name()}: {error!r}"))


async def bounded(problem: str, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
    """Do `work` during shutdown: if it fails or takes too long, log `problem` and go on."""
    try:
        async with asyncio.timeout(timeout_s):
            await work
    except Exception as error:  # noqa: BLE001 - the shutdown continues
        log.warning("%s: %r", problem, error)


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do `work` until `stop` is set; return whether it was done. Raises what it raises."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        await _cancel([working, stopping])


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    """End `tasks`. One that misses a cancellation, as `wait_for` does when its work ends just then, gets another."""
    pending = {task for task in tasks if not task.done()}
    for _ in range(CANCEL_TRIES):
        if not pending:
            return
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=1.0)
    if pending:
        log.warning("still running after they were cancelled: %s", ", ".join(sorted(t.get_name() for t in pending)))


def _report_status(status: str) -> None:
    """Tell the supervisor what a process that stops is waiting for."""
    log.debug("%s", status)
    notify(f"STATUS={status}")
