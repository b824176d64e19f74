"""What one process reports about itself and its requests, over its system server or the edge."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from baton.config.environment import otel_variables, process_name
from baton.config.public_settings import public_settings
from baton.config.settings import Settings
from baton.ports.engine import Capabilities
from baton.protocol.events import LoadSnapshot
from baton.timelines.otel import TraceExport, exports_traces, start_export
from baton.timelines.reports import AboutReply, ProcessReport, RankLoad, TimelinesReply
from baton.timelines.ring import TimelineRing

log = logging.getLogger(__name__)


class ProcessStatus(NamedTuple):
    """The part of the reports that changes while the process runs, and differs between its kinds."""

    health: str
    in_flight: int
    model: str | None = None
    capabilities: Capabilities | None = None
    load: Iterable[LoadSnapshot] = ()
    rooms: Mapping[str, int] = {}
    transfers: Mapping[str, float] = {}
    commands: Iterable[str] = ()


class ProcessReports:
    """Builds the reports of one process, whose requests are recorded in `timelines`."""

    def __init__(self, settings: Settings, role: str, engine: str | None = None) -> None:
        self.timelines = TimelineRing(settings.timeline_requests, role)
        self._settings = settings
        self._role = role
        self._engine = engine
        self._name = own_name(role)
        self._host = socket.gethostname()
        self._started_unix_s = time.time()
        self._export: TraceExport | None = None
        variables = otel_variables()
        if exports_traces(variables):
            self._start_export(variables)

    def _start_export(self, variables: Mapping[str, str]) -> None:
        if not self.timelines.is_on:
            log.warning("traces are not exported: they are made of timelines, and --timeline-requests is 0")
            return
        self._export = start_export(self._role, self._name, variables)
        if self._export is not None:
            self.timelines.on_finish = self._export
            self.timelines.samples = self._export.is_sampled

    async def aclose(self) -> None:
        """Export what has not been exported. Bounded, and idempotent."""
        export, self._export = self._export, None
        if export is not None:
            self.timelines.on_finish = None
            await asyncio.to_thread(export.close)

    def page(self, after: int, limit: int, model: str | None) -> TimelinesReply:
        """Return some of the timelines; see `TimelineRing.page`."""
        return self.timelines.page(self._process(model), after, limit)

    def about(self, status: ProcessStatus) -> AboutReply:
        """Return the report of the process."""
        can = status.capabilities
        return AboutReply(
            process=self._process(status.model),
            settings=public_settings(self._settings),
            capabilities={} if can is None else msgspec.to_builtins(can),
            load=[
                RankLoad(
                    rank=each.dp_rank,
                    running=each.running,
                    waiting=each.waiting,
                    used_blocks=each.used_blocks,
                    total_blocks=each.total_blocks,
                )
                for each in status.load
            ],
            health=status.health,
            in_flight=status.in_flight,
            rooms=dict(status.rooms),
            transfers={transport: int(number) for transport, number in status.transfers.items()},
            last_errors=self.timelines.last_errors,
            commands=list(status.commands),
        )

    def _process(self, model: str | None) -> ProcessReport:
        return ProcessReport(
            name=self._name,
            role=self._role,
            model=model or self._settings.first_name or None,
            engine=self._engine,
            pid=os.getpid(),
            host=self._host,
            started_unix_s=self._started_unix_s,
        )


def own_name(role: str) -> str:
    """Return the name of this process: the one that its `baton serve` has given it, or its role and process id."""
    return process_name() or f"{role}-{os.getpid()}"
