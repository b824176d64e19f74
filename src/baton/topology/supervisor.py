"""The supervisor behind `baton serve`: runs a frontend and workers, and restarts a process that exits or hangs."""

import asyncio
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec

from baton.config.directories import supervisor_directory
from baton.config.owned_directory import owned_directory
from baton.config.settings import Settings, endpoint_url
from baton.control.process_entries import published_entry
from baton.engines.registry import prepare_model
from baton.errors import ConfigError, EngineDead
from baton.process.signals import stop_on_signals
from baton.process.title import set_process_title
from baton.topology.control_socket import ControlSocket
from baton.topology.fleet import Fleet
from baton.topology.instances import endpoint_port, refuse_taken_address
from baton.topology.operations import Operations
from baton.topology.own_endpoint import OwnEndpoint
from baton.topology.process_logs import refuse_unusable_log_dir
from baton.topology.start_display import show_start
from baton.topology.startup import send_first_request, wait_for_models
from baton.topology.stopping import report_stop, stop_on_hangup
from baton.topology.terminal import Terminal
from baton.topology.view import running_view


def run_supervisor(settings: Settings, terminal: Terminal) -> int:
    """Run all processes until SIGINT or SIGTERM. `terminal` shows what happens.

    The model is fetched here, once for all workers, and before `start_timeout_s` begins.
    """
    import uvloop

    refuse_taken_address(settings)
    refuse_unusable_log_dir(settings)
    settings = prepare_model(settings)
    set_process_title("serve", "serve", settings.first_name)
    with owned_directory() as run_dir, endpoint_port(settings) as settings:
        return uvloop.run(_main(settings, run_dir, terminal))


async def _main(settings: Settings, run_dir: Path, terminal: Terminal) -> int:
    if settings.runtime.discovery == "file" and not settings.runtime.directory:
        runtime = msgspec.structs.replace(settings.runtime, directory=str(run_dir / "discovery"))
        settings = msgspec.structs.replace(settings, runtime=runtime)
    fleet = Fleet(settings, run_dir)
    operations = Operations(settings, fleet)
    control = ControlSocket(run_dir / "control.sock", operations)

    def end_at_once() -> None:
        fleet.kill()
        shutil.rmtree(run_dir, ignore_errors=True)

    stop = stop_on_signals(end_at_once)
    stop_on_hangup(stop)
    async with running_view(settings) as view_url:
        await control.start()
        try:
            with _published(settings, control):
                if await _start(settings, fleet, stop, terminal):
                    terminal.serving(settings, view_url)
                    await fleet.keep_until(stop)
        finally:
            await control.aclose()
            await _stop(settings, fleet, terminal if stop.is_set() else None)
    return 0


def _published(settings: Settings, control: ControlSocket) -> AbstractContextManager[None]:
    """Return a block within which other commands of this user find this `baton serve`."""
    try:
        return published_entry(supervisor_directory(), endpoint_url(settings), control.url)
    except ConfigError:  # no home directory
        return nullcontext()


async def _start(settings: Settings, fleet: Fleet, stop: asyncio.Event, terminal: Terminal) -> bool:
    """Start all processes; return True when a request has been answered, False if `stop` is set before.

    Raises ConfigError or EngineDead with the exit reason of a process that cannot start, or with what prevents it.
    """
    terminal.starting(settings)
    await fleet.start()
    first = FirstAnswer(settings, fleet)
    starting = asyncio.ensure_future(first.wait())
    stopping = asyncio.ensure_future(stop.wait())
    showing = asyncio.ensure_future(show_start(fleet.processes(), terminal))
    tasks = (starting, stopping, showing)
    try:
        await asyncio.wait([starting, stopping], timeout=settings.start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await asyncio.wait([showing])
            return True
        if stop.is_set():
            return False
        raise EngineDead(
            f"the start took longer than {settings.start_timeout_s:g} s, waiting for {first.awaited};"
            " raise --start-timeout-s if it needs more"
        )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class FirstAnswer:
    """The way to the first answer, and what it waits for now."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        self._settings = settings
        self._fleet = fleet
        self.awaited = "its processes"

    async def wait(self) -> None:
        """Wait until all processes are ready and a request has been answered. Raises ConfigError or EngineDead."""
        await asyncio.gather(*(self._fleet.wait_ready(process) for process in self._fleet.processes()))
        endpoint, names = OwnEndpoint(self._settings), self._settings.served_names
        self.awaited = f"the frontend to list {', '.join(names)}"
        await wait_for_models(endpoint, names)
        self.awaited = "the answer to a first request"
        await send_first_request(endpoint, self._settings)


async def _stop(settings: Settings, fleet: Fleet, terminal: Terminal | None) -> None:
    """Stop all processes. `terminal` shows what is waited for."""
    if terminal is None:
        await fleet.stop()
        return
    reporting = asyncio.create_task(report_stop(fleet.processes(), settings.drain_timeout_s, terminal.stopping))
    await fleet.stop()
    reporting.cancel()
    await asyncio.wait([reporting])
