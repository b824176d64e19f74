"""The processes of one `baton serve`: its frontend, and workers that can be added and removed while it serves."""

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from baton.config.directories import control_directory, process_directory, supervisor_directory
from baton.config.environment import PROCESS_NAME
from baton.config.load import to_environment
from baton.config.settings import Settings, endpoint_url
from baton.control.http.token_file import remove_token
from baton.control.process_entries import remove_ended
from baton.errors import BatonError, ConfigError, EngineDead
from baton.topology.process import Process
from baton.topology.process_logs import begin_log, begin_run
from baton.topology.process_specs import ProcessPlan, ProcessSpec
from baton.topology.supervision import Keepers, keep_running

log = logging.getLogger(__name__)

EXIT_CONFIG = 2
STOP_MARGIN_S = 15.0
FRONTEND_STOP_S = 10.0


class Member(NamedTuple):
    """A process, and what it was started for."""

    spec: ProcessSpec
    process: Process


class Fleet:
    """Creates, adds, removes and stops processes. One event loop, which also decides which of them change when.

    Raises ConfigError for settings that conflict, or if logs or sockets cannot be created.
    """

    def __init__(self, settings: Settings, run_dir: Path) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._base = to_environment(settings)
        self._socket_numbers = count()
        self._keepers: Keepers | None = None
        self.plan = ProcessPlan(settings, cores=len(os.sched_getaffinity(0)))
        specs = self.plan.first_specs()
        begin_run(settings)
        self.frontend = self._create(ProcessSpec("frontend", {}, "frontend"))
        self.workers = {spec.name: self._create(spec) for spec in specs}

    @property
    def is_kept(self) -> bool:
        """Whether all processes have been ready and are kept running."""
        return self._keepers is not None

    def members(self) -> Iterator[Member]:
        """Yield the frontend and the workers."""
        yield self.frontend
        yield from self.workers.values()

    def processes(self) -> list[Process]:
        """Return all processes, the frontend first."""
        return [member.process for member in self.members()]

    def specs(self) -> list[ProcessSpec]:
        """Return what the workers were started for."""
        return [member.spec for member in self.workers.values()]

    async def start(self) -> None:
        """Start all processes, and return while they start. Raises EngineDead."""
        for process in self.processes():
            await process.start(self._settings.stall_timeout_s)

    async def keep_until(self, stop: asyncio.Event) -> None:
        """Restart processes that exit or hang, until `stop` is set. Raises EngineDead if it cannot any more."""
        self._keepers = Keepers()
        try:
            for process in self.processes():
                self._keep(process)
            await self._keepers.run_until(stop)
        finally:
            self._keepers = None

    async def add(self, spec: ProcessSpec) -> None:
        """Start one more worker and return when it is ready.

        Raises ConfigError or EngineDead, as `wait_ready` does; there is no such worker then.
        """
        self.workers[spec.name] = member = self._create(spec)
        self._share_cores()
        try:
            await self._start_one(member.process)
        except BatonError:
            await self._discard(member)
            raise
        self._keep(member.process)

    async def remove(self, name: str) -> None:
        """Drain a worker and forget it. Its requests get `drain_timeout_s` to finish."""
        await self._stop_keeping(name)
        await self._discard(self.workers[name])

    async def restart(self, name: str) -> None:
        """Drain a worker and start it again; return when it is ready.

        Raises ConfigError or EngineDead, as `wait_ready` does; it is kept running then, as one that has exited.
        """
        await self._stop_keeping(name)
        process = self.workers[name].process
        await self._stop(process, self._drain_limit_s)
        try:
            await self._start_one(process)
        except BatonError:
            self._keep(process)
            raise
        self._keep(process)

    async def wait_ready(self, process: Process) -> None:
        """Wait until `process` is ready. Raises ConfigError or EngineDead, with its exit reason, if it exits before."""
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

    async def stop(self) -> None:
        """Drain the workers, then stop the frontend. A process that does not exit in time is killed.

        Once the workers have exited, all streams have ended: the frontend only sends the rest to its clients.
        """
        limit_s = self._drain_limit_s
        await asyncio.gather(*(self._stop(member.process, limit_s) for member in self.workers.values()))
        await self._stop(self.frontend.process, min(limit_s, FRONTEND_STOP_S))
        for process in self.processes():
            process.close()
        _remove_entries()

    def kill(self) -> None:
        """Kill every process at once, without draining, and remove the control tokens that they leave."""
        for process in self.processes():
            process.send_signal(signal.SIGKILL)
            process.remove_token()
        with suppress(ConfigError):  # no home directory
            remove_token(control_directory(), endpoint_url(self._settings))

    @property
    def _drain_limit_s(self) -> float:
        return self._settings.drain_timeout_s + STOP_MARGIN_S

    def _create(self, spec: ProcessSpec) -> Member:
        # Numbered, because the path of a socket has to be short.
        socket_path = self._run_dir / f"{next(self._socket_numbers)}.sock"
        name = {PROCESS_NAME: f"{self._settings.port}/{spec.name}"}
        variables = {**self._base, **spec.variables, **name}
        output = begin_log(self._settings, spec.name)
        return Member(spec, Process(spec.name, spec.command, variables, socket_path, output))

    def _share_cores(self) -> None:
        """Give each worker its share of the cores; those that run use it from their next start on."""
        for name, variables in self.plan.threads(self.specs()).items():
            self.workers[name].process.variables.update(variables)

    def _keep(self, process: Process) -> None:
        if self._keepers is not None:
            limits = self._settings.stall_timeout_s, self._settings.start_timeout_s
            self._keepers.add(process.name, keep_running(process, *limits))

    async def _stop_keeping(self, name: str) -> None:
        if self._keepers is not None:
            await self._keepers.remove(name)

    async def _start_one(self, process: Process) -> None:
        await process.start(self._settings.stall_timeout_s)
        limit_s = self._settings.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self.wait_ready(process)
        except TimeoutError:
            raise EngineDead(
                f"the start of {process.name} took longer than {limit_s:g} s; raise --start-timeout-s"
            ) from None

    async def _discard(self, member: Member) -> None:
        await self._stop(member.process, self._drain_limit_s)
        member.process.close()
        del self.workers[member.spec.name]
        self._share_cores()
        _remove_entries()

    async def _stop(self, process: Process, limit_s: float) -> None:
        if process.pid is None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(limit_s):
                await process.wait()
        except TimeoutError:
            log.error("%s did not exit within %g s (%s); killing it", process.name, limit_s, process.exit_reason())
            process.send_signal(signal.SIGKILL)
            await process.wait()


def _remove_entries() -> None:
    """Remove the entries of processes that were killed.

    Those of workers are targets of metrics as long as they are expected.
    """
    with suppress(ConfigError):  # no home directory
        for directory in (process_directory(), supervisor_directory()):
            remove_ended(directory)
