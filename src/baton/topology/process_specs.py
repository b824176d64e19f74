"""What one `baton serve` starts beside its frontend: names, roles, ports and shares of the machine."""

import shlex
from pathlib import Path
from typing import NamedTuple

from baton.config.load import options, override, to_environment
from baton.config.settings import MAX_PORT, Settings
from baton.errors import ConfigError
from baton.router.topology_file import Group, read_blueprint


class Place(NamedTuple):
    """One process to start: what it is called, the settings that are its own, as variables, and its command."""

    name: str
    variables: dict[str, str]
    command: str = "worker"


def lay_out(settings: Settings, cores: int) -> list[Place]:
    """Return what to start on a machine with `cores`. Raises ConfigError if it cannot be a whole."""
    places = _pools(settings, cores) if settings.topology else _workers(settings, cores)
    if settings.system_port + len(places) - 1 > MAX_PORT:
        raise ConfigError(
            f"--system-port {settings.system_port} is too high for {len(places)} workers: {MAX_PORT} is the last"
        )
    return [
        place._replace(variables={**place.variables, **_port(settings, number)}) for number, place in enumerate(places)
    ]


def _workers(settings: Settings, cores: int) -> list[Place]:
    names = _names(settings)
    own = _share_of_cores(settings, cores, len(names))
    return [Place(f"{role}-{number}", {**_role(role, settings), **own}) for role, number in names]


def _pools(settings: Settings, cores: int) -> list[Place]:
    """Return the workers of every pool that names some, and the router before them."""
    groups = _groups(settings)
    own = _share_of_cores(settings, cores, sum(group.count for group in groups))
    places = [Place("router", {}, "router run")]
    for group in groups:
        source = f"the workers of {group.part} pool {group.pool} in {settings.topology}"
        pooled = override(settings, {**group.settings, "namespace": group.namespace, "role": group.part}, source)
        variables = {**to_environment(pooled), **({} if pooled.torch.threads else own)}
        # A worker's role is all that it needs of the topology, and the pool's name alone would not tell both parts.
        prefix = group.pool if group.part == "aggregated" else f"{group.part}-{group.pool}"
        places += [Place(f"{prefix}-{number}", variables) for number in range(group.count)]
    return places


def _groups(settings: Settings) -> tuple[Group, ...]:
    groups = read_blueprint(Path(settings.topology), settings.namespace).groups
    if not groups:
        raise ConfigError(
            f"no pool in {settings.topology} says which workers to start: give one `workers: {{count: 1}}`,"
            f" or start the router alone with `baton router run --topology {settings.topology}`"
        )
    return groups


def describe(settings: Settings) -> str:
    """Return in words what runs: "2 workers", "1 prefill and 2 decode workers"."""
    if settings.topology:
        groups = _groups(settings)
        workers = sum(group.count for group in groups)
        return f"{workers} worker{'s' * (workers != 1)} in {len(groups)} pools behind a router"
    encoders = f" and {settings.encode} to encode" if settings.encode else ""
    if settings.prefill:
        return f"{settings.prefill} prefill and {settings.decode} decode workers{encoders}"
    return ("1 worker" if settings.workers == 1 else f"{settings.workers} workers") + encoders


def joining(settings: Settings) -> str:
    """Return the command that adds a worker to those of a running `baton serve` with these settings."""
    flags = {
        "--role": "decode" if settings.prefill else "auto",
        "--engine": settings.engine,
        "--model": settings.model,
        "--name": settings.name,
        "--namespace": settings.namespace,
        "--runtime-discovery": settings.runtime.discovery,
        "--runtime-directory": settings.runtime.directory,
    }
    usual = {option.flag: option.default for option in options()}
    given = [f"{flag} {shlex.quote(value)}" for flag, value in flags.items() if value != usual[flag]]
    words = ["--", shlex.join(settings.engine_args)] if settings.engine_args else []
    return " ".join(["baton worker", *given, *words])


def _names(settings: Settings) -> list[tuple[str, int]]:
    return _computing(settings) + [("encode", number) for number in range(settings.encode)]


def _computing(settings: Settings) -> list[tuple[str, int]]:
    if not settings.prefill:
        if settings.role in ("prefill", "decode", "encode"):
            flags = "--encode" if settings.role == "encode" else "--prefill and --decode"
            raise ConfigError(
                f"--role {settings.role} alone serves nobody: give {flags} instead,"
                f" or add a worker to those that run with `baton worker --role {settings.role}`"
            )
        return [("worker", number) for number in range(settings.workers)]
    if settings.role != "auto":
        raise ConfigError(f"--prefill and --decode say what workers do: drop --role {settings.role}")
    return [("prefill", number) for number in range(settings.prefill)] + [
        ("decode", number) for number in range(settings.decode)
    ]


def _role(role: str, settings: Settings) -> dict[str, str]:
    own = {} if role == "worker" else {"BATON_ROLE": role}
    return {**own, "BATON_MEDIA_ENCODERS": str(role != "encode").lower()} if settings.encode else own


def _port(settings: Settings, place: int) -> dict[str, str]:
    base = settings.system_port
    return {"BATON_SYSTEM_PORT": str(base + place)} if base else {}


def _share_of_cores(settings: Settings, cores: int, workers: int) -> dict[str, str]:
    """Workers that share a machine share its cores: more threads than cores wait for each other."""
    if settings.torch.threads or workers == 1:
        return {}
    return {"BATON_TORCH_THREADS": str(max(1, cores // workers))}
