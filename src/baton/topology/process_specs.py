"""The processes that `baton serve` starts beside its frontend: their names, roles, ports and shares of the cores."""

import shlex
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

from baton.config.load import options, override, to_environment
from baton.config.settings import MAX_PORT, Settings
from baton.errors import ConfigError
from baton.router.topology_file import WorkerGroup, read_topology

MAX_POOL_NAME = 100
ALL_CORES = 0
"""The number of threads of an engine that has the machine for itself."""


class ProcessGroup(NamedTuple):
    """Processes that differ in their number and ports only, and whose count can be changed while they serve.

    `computes`: they have an engine on the cores of this machine; those with `threads` of their own do not share them.
    """

    name: str
    first_count: int
    variables: dict[str, str]
    command: str = "worker"
    computes: bool = True
    own_threads: bool = False

    @property
    def scalable(self) -> bool:
        """Whether there can be more of them: there is one router."""
        return self.command == "worker"


class ProcessSpec(NamedTuple):
    """One process to start: its name, its own settings as environment variables, and its `baton` command.

    `slot` is its place among the ports of system servers.
    """

    name: str
    variables: dict[str, str]
    command: str = "worker"
    group: str = ""
    slot: int = 0


def build_process_specs(settings: Settings, cores: int) -> list[ProcessSpec]:
    """Return the processes to start on a machine with `cores`. Raises ConfigError for settings that conflict."""
    return ProcessPlan(settings, cores).first_specs()


class ProcessPlan:
    """Which processes there are, how they are named, and how they share ports and cores. Pure: starts nothing.

    Raises ConfigError for settings that conflict.
    """

    def __init__(self, settings: Settings, cores: int) -> None:
        self._settings = settings
        self._cores = cores
        self.groups = {group.name: group for group in _groups(settings)}

    def first_specs(self) -> list[ProcessSpec]:
        """Return the processes that the settings ask for. Raises ConfigError if they have too few ports."""
        specs: list[ProcessSpec] = []
        for group in self.groups.values():
            specs += [self._spec(group, number, len(specs) + number) for number in range(group.first_count)]
        threads = self.threads(specs)
        return [spec._replace(variables={**spec.variables, **threads.get(spec.name, {})}) for spec in specs]

    def next_spec(self, group: ProcessGroup, running: Sequence[ProcessSpec]) -> ProcessSpec:
        """Return one more process of `group` beside those that run, with the lowest free number and port.

        Raises ConfigError if there is no port for it.
        """
        names = {spec.name for spec in running}
        slots = {spec.slot for spec in running}
        number = next(number for number in count() if f"{group.name}-{number}" not in names)
        return self._spec(group, number, next(slot for slot in count() if slot not in slots))

    def threads(self, running: Sequence[ProcessSpec]) -> dict[str, dict[str, str]]:
        """Return the compute threads, as variables, of each process that shares the cores with the others, by name.

        More threads than cores slow each other down.
        """
        computing = [spec for spec in running if self.groups[spec.group].computes]
        share = max(1, self._cores // len(computing)) if len(computing) > 1 else ALL_CORES
        sharing = (spec for spec in computing if not self.groups[spec.group].own_threads)
        return {spec.name: {"BATON_TORCH_THREADS": str(share)} for spec in sharing}

    def _spec(self, group: ProcessGroup, number: int, slot: int) -> ProcessSpec:
        base = self._settings.system_port
        if base + slot > MAX_PORT:
            raise ConfigError(f"--system-port {base} is too high for {slot + 1} processes: the last port is {MAX_PORT}")
        port = {"BATON_SYSTEM_PORT": str(base + slot)} if base else {}
        name = f"{group.name}-{number}" if group.scalable else group.name
        return ProcessSpec(name, {**group.variables, **port}, group.command, group.name, slot)


def _groups(settings: Settings) -> list[ProcessGroup]:
    language = _language_settings(settings)
    groups = _pool_groups(language) if settings.topology else _worker_role_groups(language)
    if settings.process:
        groups.append(ProcessGroup("process", settings.process, {"BATON_ROLE": "process"}, computes=False))
    return groups


def _language_settings(settings: Settings) -> Settings:
    """Return the settings of the workers that have engines: behind process workers, no frontend may find them."""
    if not settings.process:
        return settings
    return override(settings, {"namespace": settings.language_worker_namespace}, "--process")


def _worker_role_groups(settings: Settings) -> list[ProcessGroup]:
    counts = {**_generating(settings), "encode": settings.encode}
    return [
        ProcessGroup(
            role,
            number,
            {**_role_variables(role, settings), **_namespace(settings)},
            own_threads=_has_threads(settings),
        )
        for role, number in counts.items()
        if number
    ]


def _pool_groups(settings: Settings) -> list[ProcessGroup]:
    """Return the router, the workers of every pool that the topology file starts workers for, and encode workers.

    Encode workers are in the namespace of the frontend, which calls them before the router.
    """
    variables = {**_namespace(settings), **_encoder_variables(settings, "router")}
    groups = [ProcessGroup("router", 1, variables, "router run", computes=False)]
    for group in _worker_groups(settings):
        source = f"the workers of {group.role} pool {group.pool} in {settings.topology}"
        pooled = override(settings, {**group.settings, "namespace": group.namespace, "role": group.role}, source)
        variables = {**to_environment(pooled), **_encoder_variables(settings, group.role)}
        # A prefill and a decode pool may have the same name.
        name = group.pool if group.role == "aggregated" else f"{group.role}-{group.pool}"
        groups.append(ProcessGroup(name, group.count, variables, own_threads=_has_threads(pooled)))
    if settings.encode:
        encoding = {**_role_variables("encode", settings), **_namespace(settings)}
        groups.append(ProcessGroup("encode", settings.encode, encoding, own_threads=_has_threads(settings)))
    return groups


def _has_threads(settings: Settings) -> bool:
    return settings.torch.threads > 0


def _worker_groups(settings: Settings) -> tuple[WorkerGroup, ...]:
    groups = read_topology(Path(settings.topology), settings.namespace, settings.pool_endpoint).groups
    for group in groups:
        if len(group.pool) > MAX_POOL_NAME:
            raise ConfigError(
                f"pool {group.pool} in {settings.topology}: the name of a pool with workers names files too and has at"
                f" most {MAX_POOL_NAME} characters"
            )
    if not groups:
        raise ConfigError(
            f"no pool in {settings.topology} has workers to start: give one `workers: {{count: 1}}`,"
            f" or start the router alone with `baton router run --topology {settings.topology}`"
        )
    return groups


def describe_workers(settings: Settings) -> str:
    """Return a summary for the terminal: "2 workers", "1 prefill and 2 decode workers"."""
    others = "".join(
        f" and {_count(number, f'{role} worker')}"
        for role, number in (("encode", settings.encode), ("process", settings.process))
        if number
    )
    if settings.topology:
        groups = _worker_groups(_language_settings(settings))
        pools = f"{_count(sum(group.count for group in groups), 'worker')} in {len(groups)} pools behind a router"
        return pools + others
    if settings.prefill:
        return f"{settings.prefill} prefill and {settings.decode} decode workers{others}"
    return _count(settings.workers, "worker") + others


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"


def add_worker_command(settings: Settings) -> str:
    """Return the command that adds a worker to a running `baton serve` with these settings."""
    flags = {
        "--role": "decode" if settings.prefill else "auto",
        "--engine": settings.engine,
        "--model": settings.model,
        "--name": settings.name,
        "--namespace": _language_settings(settings).namespace,
        "--runtime-discovery": settings.runtime.discovery,
        "--runtime-directory": settings.runtime.directory,
    }
    defaults = {option.flag: option.default for option in options()}
    args = [f"{flag} {shlex.quote(value)}" for flag, value in flags.items() if value != defaults[flag]]
    engine_args = ["--", shlex.join(settings.engine_args)] if settings.engine_args else []
    return " ".join(["baton worker", *args, *engine_args])


def _generating(settings: Settings) -> dict[str, int]:
    """Return the number of workers of each role that is not encode."""
    if not settings.prefill:
        if settings.role in ("prefill", "decode", "encode", "process"):
            flags = f"--{settings.role}" if settings.role in ("encode", "process") else "--prefill and --decode"
            raise ConfigError(
                f"workers with --role {settings.role} cannot serve requests alone: give {flags} instead,"
                f" or add one to a `baton serve` that has some with `baton scale {settings.role}=N`"
            )
        return {"worker": settings.workers}
    if settings.role != "auto":
        raise ConfigError(f"--prefill and --decode set the roles of the workers: drop --role {settings.role}")
    return {"prefill": settings.prefill, "decode": settings.decode}


def _role_variables(role: str, settings: Settings) -> dict[str, str]:
    variables = {} if role == "worker" else {"BATON_ROLE": role}
    return {**variables, **_encoder_variables(settings, role)}


def _encoder_variables(settings: Settings, role: str) -> dict[str, str]:
    """Return whether a process takes media from encode workers, if there are any."""
    return {"BATON_MEDIA_ENCODERS": str(role != "encode").lower()} if settings.encode else {}


def _namespace(settings: Settings) -> dict[str, str]:
    return {"BATON_NAMESPACE": settings.namespace} if settings.process else {}
