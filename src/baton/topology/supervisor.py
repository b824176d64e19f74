"""The supervisor behind `baton serve`: runs a frontend and workers, and restarts a process that exits or hangs."""

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from baton.config.directories import log_directory
from baton.config.load import to_environment
from baton.config.settings import Settings
from baton.engines.registry import prepare_model
from baton.errors import BatonError, ConfigError, EngineDead
from baton.process.signals import stop_on_signals
from baton.runtimes.dynamo.listener import refuse_unusable_address
from baton.topology.log_file import LogFile, log_name
from baton.topology.process import Process
from baton.topology.process_specs import ProcessSpec, build_process_specs
from baton.topology.startup import show_progress, wait_for_model
from baton.topology.supervision import keep_running, run_until

log = logging.getLogger(__name__)

EXIT_CONFIG = 2
STOP_MARGIN_S = 15.0
FRONTEND_STOP_S = 10.0
ROTATE_INTERVAL_S = 2.0


Announce = Callable[[str, Settings], None]


def run_supervisor(settings: Settings, announce: Announce) -> int:
    """Run all processes until SIGINT or SIGTERM. `announce` is called once, when the endpoint serves a model.

    The model is fetched here, once for all workers, and before `start_timeout_s` begins.
    """
    import uvloop

    refuse_unusable_address(settings.host, settings.port, "--host", "--port")
    _refuse_unusable_log_dir(settings)
    settings = prepare_model(settings)
    with tempfile.TemporaryDirectory(prefix="baton-") as run_dir:
        return uvloop.run(_main(settings, Path(run_dir), announce))


async def _main(settings: Settings, run_dir: Path, announce: Announce) -> int:
    if settings.runtime.discovery == "file" and not settings.runtime.directory:
        runtime = msgspec.structs.replace(settings.runtime, directory=str(run_dir / "discovery"))
        settings = msgspec.structs.replace(settings, runtime=runtime)
    supervisor = Supervisor(settings, run_dir)
    stop = stop_on_signals(supervisor.kill)
    try:
        model = await supervisor.start(stop)
        if model is not None:
            announce(model, settings)
            await supervisor.watch(stop)
    finally:
        await supervisor.stop()
    return 0


def _refuse_unusable_log_dir(settings: Settings) -> None:
    """Raise ConfigError if logs cannot be written."""
    if (directory := log_directory(settings)) is not None:
        with _log_errors(directory):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            tempfile.TemporaryFile(dir=directory).close()


def _begin_log(settings: Settings, process: str) -> LogFile | None:
    """Return the log of `process`, empty, or None for standard error. Raises ConfigError."""
    if (directory := log_directory(settings)) is None:
        return None
    log_file = LogFile(directory / log_name(settings.host, settings.port, process), settings.log_max_bytes)
    with _log_errors(directory):
        log_file.begin()
    return log_file


@contextmanager
def _log_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f" {Path(error.filename).name}" if error.filename else ""
        raise ConfigError(
            f"cannot write log{what} in {directory} ({error.strerror}); choose another directory with --log-dir"
        ) from None


class Supervisor:
    """Starts, restarts and stops the processes of one `baton serve`."""

    def __init__(self, settings: Settings, run_dir: Path) -> None:
        self._settings = settings
        self._logs: list[LogFile] = []
        base = to_environment(settings)

        def process(number: int, spec: ProcessSpec) -> Process:
            log_file = _begin_log(settings, spec.name)
            if log_file is not None:
                self._logs.append(log_file)
            # Numbered, because the path of a socket has to be short.
            socket_path = run_dir / f"{number}.sock"
            return Process(spec.name, spec.command, {**base, **spec.variables}, socket_path, log_file)

        specs = build_process_specs(settings, cores=len(os.sched_getaffinity(0)))
        self._frontend = process(0, ProcessSpec("frontend", {}, "frontend"))
        self._workers = [process(number, spec) for number, spec in enumerate(specs, 1)]

    async def start(self, stop: asyncio.Event) -> str | None:
        """Start all processes; return the name of the model when it is served, or None if `stop` is set before.

        Raises ConfigError or EngineDead with the exit reason of a process that cannot start, or with what prevents it.
        """
        processes = [self._frontend, *self._workers]
        for process in processes:
            await process.start(self._settings.stall_timeout_s)
        starting = asyncio.ensure_future(self._all_ready(processes))
        stopping = asyncio.ensure_future(stop.wait())
        showing = asyncio.ensure_future(show_progress(processes))
        await asyncio.wait(
            [starting, stopping], timeout=self._settings.start_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        stopping.cancel()
        showing.cancel()
        await asyncio.wait([showing])
        if not starting.done():
            starting.cancel()
            if stop.is_set():
                return None
            raise EngineDead(f"the start took longer than {self._settings.start_timeout_s:g} s")
        return starting.result()

    async def watch(self, stop: asyncio.Event) -> None:
        """Restart processes that exit or hang, until `stop` is set. Raises EngineDead if it cannot any more."""
        limits = self._settings.stall_timeout_s, self._settings.start_timeout_s
        supervision = [keep_running(process, *limits) for process in (self._frontend, *self._workers)]
        await run_until(stop, [*supervision, _rotate_forever(self._logs)])

    async def stop(self) -> None:
        """Drain the workers, then stop the frontend. A process that does not exit in time is killed.

        Once the workers have exited, all streams have ended: the frontend only sends the rest to its clients.
        """
        limit_s = self._settings.drain_timeout_s + STOP_MARGIN_S
        await asyncio.gather(*(self._stop_process(process, limit_s) for process in self._workers))
        await self._stop_process(self._frontend, min(limit_s, FRONTEND_STOP_S))
        for process in (self._frontend, *self._workers):
            process.close()

    def kill(self) -> None:
        """Kill every process at once, without draining."""
        for process in (self._frontend, *self._workers):
            process.send_signal(signal.SIGKILL)

    async def _all_ready(self, processes: list[Process]) -> str:
        await asyncio.gather(*(self._ready_or_raise(process) for process in processes))
        return await wait_for_model(self._settings)

    async def _ready_or_raise(self, process: Process) -> None:
        ended = asyncio.ensure_future(process.wait())
        ready = asyncio.ensure_future(process.ready.wait())
        try:
            await asyncio.wait([ended, ready], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                error: type[BatonError] = ConfigError if ended.result() == EXIT_CONFIG else EngineDead
                raise error(process.exit_reason() or f"{process.name} exited with code {ended.result()}")
        finally:
            ended.cancel()
            ready.cancel()

    async def _stop_process(self, process: Process, limit_s: float) -> None:
        if process.pid is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), limit_s)
        except TimeoutError:
            log.error("%s did not exit within %g s (%s); killing it", process.name, limit_s, process.exit_reason())
            process.send_signal(signal.SIGKILL)
            await process.wait()


async def _rotate_forever(logs: list[LogFile]) -> None:
    """Keep logs bounded. One that cannot be rotated is tried again: logs are no reason to stop serving."""
    while True:
        await asyncio.sleep(ROTATE_INTERVAL_S)
        for each in logs:
            try:
                await asyncio.to_thread(each.rotate)
            except OSError as error:
                log.warning("cannot rotate a log: %s", error)
