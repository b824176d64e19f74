"""What other commands can do with a running `baton serve`: see its processes, change their number, drain one."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from baton.config.load import an_api_key
from baton.config.settings import Settings, endpoint_url
from baton.errors import BatonError
from baton.topology.control_messages import Counts, Done, OperationError, ProcessStatus, Status
from baton.topology.fleet import Fleet, Member
from baton.topology.process_logs import log_path
from baton.topology.process_specs import ProcessGroup, ProcessSpec

MAX_WORKERS = 256

Report = Callable[[str], None]


class Operations:
    """Carries out one change at a time; raises OperationError for others meanwhile. One event loop."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        self._settings = settings
        self._fleet = fleet
        self._running = ""

    def status(self) -> Status:
        """Return the processes and addresses, and an API key, if one is needed."""
        return Status(
            pid=os.getpid(),
            url=endpoint_url(self._settings),
            models=self._settings.served_names,
            engine=self._settings.engine,
            api_key=an_api_key(self._settings),
            counts=self._counts(),
            processes=tuple(self._process_status(member) for member in self._fleet.members()),
        )

    async def scale(self, counts: Counts, report: Report) -> Done:
        """Start and drain workers until there are `counts` of them. Raises OperationError.

        If a worker cannot start, those that are ready stay, and none is drained.
        """
        groups = {name: self._checked(name, number) for name, number in counts.items()}
        with self._exclusive("scale"):
            additions = [group for name, group in groups.items() for _ in range(counts[name] - len(self._names(name)))]
            removals = [name for group in groups for name in surplus(self._readiness(group), counts[group])]
            await self._add_all(additions, report)
            await asyncio.gather(*(self._remove(name, report) for name in removals))
            return Done(message="", counts=self._counts())

    async def drain(self, worker: str, restart: bool, report: Report) -> Done:
        """Drain a worker; with `restart`, start it again. Raises OperationError."""
        group = self._group_of(worker)
        with self._exclusive("drain"):
            if restart:
                report(f"{worker}: draining")
                await self._started(worker, self._fleet.restart(worker), report, "; `baton serve` tries again")
            else:
                self._refuse_last(worker, group)
                await self._remove(worker, report)
            return Done(message="", counts=self._counts())

    def _refuse_last(self, worker: str, group: str) -> None:
        """Raise OperationError if no worker of the group would serve without `worker`."""
        readiness = self._readiness(group)
        if not serves_without(readiness, worker):
            raise OperationError(
                "last_worker",
                f"{worker} is the last of its group that is ready: without it nothing is served. Scale up first (`baton"
                f" scale {group}={len(readiness) + 1}`), or add --restart",
            )

    @contextmanager
    def _exclusive(self, name: str) -> Iterator[None]:
        if not self._fleet.is_kept:
            raise OperationError("not_serving", "it starts or stops: try again when it serves")
        if self._running:
            raise OperationError("busy", f"another `baton {self._running}` has not finished: try again when it has")
        self._running = name
        try:
            yield
        finally:
            self._running = ""

    def _counts(self) -> Counts:
        return {name: len(self._names(name)) for name, group in self._fleet.plan.groups.items() if group.scalable}

    def _names(self, group: str) -> list[str]:
        """Return the names of the workers of a group, in the order of their numbers."""
        names = [spec.name for spec in self._fleet.specs() if spec.group == group]
        return sorted(names, key=lambda name: int(name.rpartition("-")[2]))

    def _readiness(self, group: str) -> dict[str, bool]:
        """Return whether each worker of a group is ready, in the order of their numbers."""
        return {name: self._fleet.workers[name].process.state == "ready" for name in self._names(group)}

    def _group_of(self, worker: str) -> str:
        member = self._fleet.workers.get(worker)
        if member is None or not self._fleet.plan.groups[member.spec.group].scalable:
            names = ", ".join(name for group in self._counts() for name in self._names(group))
            raise OperationError("unknown_worker", f"there is no worker {worker!r}; the workers are {names}")
        return member.spec.group

    def _checked(self, name: str, number: int) -> ProcessGroup:
        group = self._fleet.plan.groups.get(name)
        if group is None or not group.scalable:
            raise OperationError(
                "unknown_group",
                f"this `baton serve` has no workers named {name!r}; it has {', '.join(self._counts())}. Other roles"
                " need a new start, as with --prefill and --decode",
            )
        if not 1 <= number <= MAX_WORKERS:
            raise OperationError(
                "out_of_range",
                f"{name}={number}: there can be 1 to {MAX_WORKERS}; to end all, stop `baton serve` itself",
            )
        return group

    async def _add_all(self, groups: list[ProcessGroup], report: Report) -> None:
        """Start one worker for each of `groups`, at the same time. Raises OperationError if one does not start."""
        planned = self._fleet.specs()
        new: list[ProcessSpec] = []
        try:
            for group in groups:
                new.append(self._fleet.plan.next_spec(group, [*planned, *new]))
        except BatonError as error:
            raise OperationError("out_of_range", error.message) from None
        results = await asyncio.gather(*(self._add(spec, report) for spec in new), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _add(self, spec: ProcessSpec, report: Report) -> None:
        report(f"{spec.name}: starting")
        await self._started(spec.name, self._fleet.add(spec), report)

    async def _started(
        self, name: str, starting: Coroutine[Any, Any, None], report: Report, otherwise: str = ""
    ) -> None:
        """Wait for a start. Raises OperationError with the reason if it fails, and what happens then."""
        try:
            await starting
        except BatonError as error:
            raise OperationError("start_failed", f"{name} did not start: {error.message}{otherwise}") from None
        report(f"{name}: ready")

    async def _remove(self, name: str, report: Report) -> None:
        report(f"{name}: draining")
        await self._fleet.remove(name)
        report(f"{name}: stopped")

    def _process_status(self, member: Member) -> ProcessStatus:
        process, path = member.process, log_path(self._settings, member.spec.name)
        return ProcessStatus(
            name=member.spec.name,
            group=member.spec.group or member.spec.name,
            pid=process.pid,
            state=process.state,
            log=str(path) if path is not None else "",
            url=process.system_url,
        )


def surplus(readiness: Mapping[str, bool], count: int) -> list[str]:
    """Return the workers beyond `count`: those that are not ready go first, then those at the end."""
    return sorted(readiness, key=lambda name: not readiness[name])[count:]


def serves_without(readiness: Mapping[str, bool], worker: str) -> bool:
    """Whether there are others than `worker`, and one of them is ready if it is."""
    others = [ready for name, ready in readiness.items() if name != worker]
    return any(others) or (bool(others) and not readiness[worker])
