"""The supervisor behind `baton serve`: a frontend and workers as processes, restarted when they fail or freeze."""

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from baton.config.directories import log_directory
from baton.config.load import to_environment
from baton.config.settings import Settings
from baton.engines.registry import prepare_model
from baton.errors import BatonError, ConfigError, EngineDead
from baton.process.signals import stop_on_signals
from baton.runtimes.dynamo.listener import refuse_unusable_address
from baton.topology.process import Process
from baton.topology.process_specs import lay_out
from baton.topology.progress import show_progress
from baton.topology.startup import wait_for_model

log = logging.getLogger(__name__)

EXIT_CONFIG = 2
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 15.0
STOP_MARGIN_S = 15.0
FRONTEND_STOP_S = 10.0


Announce = Callable[[str, Settings], None]


def run_supervisor(settings: Settings, announce: Announce) -> int:
    """Run the whole system until it is told to stop; `announce` is called once when it serves, with the model's name.

    The model is fetched here, once and before the clock of `start_timeout_s` runs, so that workers do not all try to.
    """
    import uvloop

    refuse_unusable_address(settings.host, settings.port, "--host", "--port")
    _open_log_dir(log_directory(settings))
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


def _open_log_dir(directory: Path | None) -> Path | None:
    """Return `directory`, created if it does not exist. Raises ConfigError if it cannot be written to."""
    if directory is None:
        return None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError as error:
        raise ConfigError(
            f"cannot write logs to {directory} ({error.strerror}); choose another with --log-dir"
        ) from None


class Supervisor:
    """Owns the processes of one `baton serve`."""

    def __init__(self, settings: Settings, run_dir: Path) -> None:
        self._settings = settings
        log_dir = _open_log_dir(log_directory(settings))
        base = to_environment(settings)

        def process(name: str, command: str, extra: dict[str, str]) -> Process:
            path = log_dir / f"{settings.port}-{name}.log" if log_dir is not None else None
            if path is not None:
                path.write_bytes(b"")
            return Process(name, command, {**base, **extra}, run_dir, path)

        self._frontend = process("frontend", "frontend", {})
        cores = len(os.sched_getaffinity(0))
        self._workers = [process(place.name, place.command, place.variables) for place in lay_out(settings, cores)]

    async def start(self, stop: asyncio.Event) -> str | None:
        """Start everything; return the model's name when it is served, or None if told to stop before.

        Raises ConfigError or EngineDead with the process's own words if one of them cannot start.
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
        """Restart what ends or freezes, until told to stop."""
        keepers = [asyncio.create_task(self._keep(process)) for process in (self._frontend, *self._workers)]
        try:
            await stop.wait()
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.wait(keepers)

    async def stop(self) -> None:
        """Drain the workers, then end the frontend; what does not end in time is killed.

        When the workers have gone, every stream has ended: the frontend has only to let clients read the rest.
        """
        limit_s = self._settings.drain_timeout_s + STOP_MARGIN_S
        await asyncio.gather(*(self._end(process, limit_s) for process in self._workers))
        await self._end(self._frontend, min(limit_s, FRONTEND_STOP_S))
        for process in (self._frontend, *self._workers):
            process.close()

    def kill(self) -> None:
        """End every process at once, with nothing finished."""
        for process in (self._frontend, *self._workers):
            process.send_signal(signal.SIGKILL)

    async def _all_ready(self, processes: list[Process]) -> str:
        await asyncio.gather(*(self._ready_or_raise(process) for process in processes))
        return await wait_for_model(self._settings.host, self._settings.port)

    async def _ready_or_raise(self, process: Process) -> None:
        ended = asyncio.ensure_future(process.wait())
        ready = asyncio.ensure_future(process.ready.wait())
        try:
            await asyncio.wait([ended, ready], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                error: type[BatonError] = ConfigError if ended.result() == EXIT_CONFIG else EngineDead
                raise error(process.last_words() or f"{process.name} ended with code {ended.result()}")
        finally:
            ended.cancel()
            ready.cancel()

    async def _keep(self, process: Process) -> None:
        backoff_s = FIRST_BACKOFF_S
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            code = await self._until_ended(process)
            backoff_s = (
                FIRST_BACKOFF_S if loop.time() - started > LONGEST_BACKOFF_S else min(2 * backoff_s, LONGEST_BACKOFF_S)
            )
            log.warning("%s ended with code %d; starting it again in %.1f s", process.name, code, backoff_s)
            await asyncio.sleep(backoff_s)
            await process.start(self._settings.stall_timeout_s)

    async def _until_ended(self, process: Process) -> int:
        """Wait for the process to end; kill it if it is ready and then shows no sign of life."""
        loop = asyncio.get_running_loop()
        ended = asyncio.ensure_future(process.wait())
        started = loop.time()
        try:
            while not ended.done():
                await asyncio.wait([ended], timeout=self._settings.stall_timeout_s / 4)
                silent_s = loop.time() - max(process.last_beat, started)
                limit_s = self._settings.stall_timeout_s if process.ready.is_set() else self._settings.start_timeout_s
                if silent_s > limit_s and not ended.done():
                    log.error("%s shows no sign of life for %.0f s; killing it", process.name, silent_s)
                    process.send_signal(signal.SIGKILL)
                    await ended
            return ended.result()
        finally:
            ended.cancel()

    async def _end(self, process: Process, limit_s: float) -> None:
        if process.pid is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), limit_s)
        except TimeoutError:
            log.error("%s did not end within %g s (%s); killing it", process.name, limit_s, process.last_words())
            process.send_signal(signal.SIGKILL)
            await process.wait()
