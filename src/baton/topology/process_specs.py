"""The processes that `baton serve` starts beside its frontend: their names, roles, ports and shares of the cores."""

import shlex
from pathlib import Path
from typing import NamedTuple

from baton.config.load import options, override, to_environment
from baton.config.settings import MAX_PORT, Settings
from baton.errors import ConfigError
from baton.router.topology_file import WorkerGroup, read_topology

MAX_POOL_NAME = 100
_PROCESS_WORKER = {"BATON_ROLE": "process"}


class ProcessSpec(NamedTuple):
    """One process to start: its name, its own settings as environment variables, and its `baton` command."""

    name: str
    variables: dict[str, str]
    command: str = "worker"


def build_process_specs(settings: Settings, cores: int) -> list[ProcessSpec]:
    """Return the processes to start on a machine with `cores`. Raises ConfigError for settings that conflict."""
    language = _language_settings(settings)
    specs = _pool_specs(language, cores) if settings.topology else _worker_specs(language, cores)
    specs += [ProcessSpec(f"process-{number}", _PROCESS_WORKER) for number in range(settings.process)]
    if settings.system_port + len(specs) - 1 > MAX_PORT:
        raise ConfigError(
            f"--system-port {settings.system_port} is too high for {len(specs)} processes: the last port is {MAX_PORT}"
        )
    return [
        spec._replace(variables={**spec.variables, **_system_port(settings, number)})
        for number, spec in enumerate(specs)
    ]


def _language_settings(settings: Settings) -> Settings:
    """Return the settings of the workers that have engines: behind process workers, no frontend may find them."""
    if not settings.process:
        return settings
    return override(settings, {"namespace": settings.language_worker_namespace}, "--process")


def _worker_specs(settings: Settings, cores: int) -> list[ProcessSpec]:
    names = _generating(settings) + [("encode", number) for number in range(settings.encode)]
    threads = _torch_threads(settings, cores, len(names))
    return [
        ProcessSpec(f"{role}-{number}", {**_role_variables(role, settings), **_namespace(settings), **threads})
        for role, number in names
    ]


def _pool_specs(settings: Settings, cores: int) -> list[ProcessSpec]:
    """Return the router, the workers of every pool that the topology file starts workers for, and encode workers.

    Encode workers are in the namespace of the frontend, which calls them before the router.
    """
    groups = _worker_groups(settings)
    threads = _torch_threads(settings, cores, sum(group.count for group in groups) + settings.encode)
    variables = {**_namespace(settings), **_encoder_variables(settings, "router")}
    specs = [ProcessSpec("router", variables, "router run")]
    for group in groups:
        source = f"the workers of {group.role} pool {group.pool} in {settings.topology}"
        pooled = override(settings, {**group.settings, "namespace": group.namespace, "role": group.role}, source)
        variables = {**to_environment(pooled), **({} if pooled.torch.threads else threads)}
        variables |= _encoder_variables(settings, group.role)
        # A prefill and a decode pool may have the same name.
        prefix = group.pool if group.role == "aggregated" else f"{group.role}-{group.pool}"
        specs += [ProcessSpec(f"{prefix}-{number}", variables) for number in range(group.count)]
    encoding = {**_role_variables("encode", settings), **_namespace(settings), **threads}
    return specs + [ProcessSpec(f"encode-{number}", encoding) for number in range(settings.encode)]


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


def _generating(settings: Settings) -> list[tuple[str, int]]:
    """Return role and number of every worker that is not an encode worker."""
    if not settings.prefill:
        if settings.role in ("prefill", "decode", "encode", "process"):
            flags = f"--{settings.role}" if settings.role in ("encode", "process") else "--prefill and --decode"
            raise ConfigError(
                f"workers with --role {settings.role} cannot serve requests alone: give {flags} instead,"
                f" or add a worker to a running `baton serve` with `baton worker --role {settings.role}`"
            )
        return [("worker", number) for number in range(settings.workers)]
    if settings.role != "auto":
        raise ConfigError(f"--prefill and --decode set the roles of the workers: drop --role {settings.role}")
    return [("prefill", number) for number in range(settings.prefill)] + [
        ("decode", number) for number in range(settings.decode)
    ]


def _role_variables(role: str, settings: Settings) -> dict[str, str]:
    variables = {} if role == "worker" else {"BATON_ROLE": role}
    return {**variables, **_encoder_variables(settings, role)}


def _encoder_variables(settings: Settings, role: str) -> dict[str, str]:
    """Return whether a process takes media from encode workers, if there are any."""
    return {"BATON_MEDIA_ENCODERS": str(role != "encode").lower()} if settings.encode else {}


def _namespace(settings: Settings) -> dict[str, str]:
    return {"BATON_NAMESPACE": settings.namespace} if settings.process else {}


def _system_port(settings: Settings, number: int) -> dict[str, str]:
    base = settings.system_port
    return {"BATON_SYSTEM_PORT": str(base + number)} if base else {}


def _torch_threads(settings: Settings, cores: int, workers: int) -> dict[str, str]:
    """Divide the cores among the workers: more threads than cores slow each other down."""
    if settings.torch.threads or workers == 1:
        return {}
    return {"BATON_TORCH_THREADS": str(max(1, cores // workers))}
