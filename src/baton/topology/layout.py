"""Which workers one `baton serve` starts: their names, their roles, their ports and their share of the machine."""

import shlex
from typing import NamedTuple

from baton.config import MAX_PORT, Settings, options
from baton.errors import ConfigError


class Place(NamedTuple):
    """One worker to start: what it is called, and the settings that are its own, as variables."""

    name: str
    variables: dict[str, str]


def lay_out(settings: Settings, cores: int) -> list[Place]:
    """Return the workers to start on a machine with `cores`. Raises ConfigError if they cannot be a whole."""
    names = _names(settings)
    own = _share_of_cores(settings, cores, len(names))
    if settings.system_port + len(names) - 1 > MAX_PORT:
        raise ConfigError(
            f"--system-port {settings.system_port} is too high for {len(names)} workers: {MAX_PORT} is the last"
        )
    return [
        Place(f"{role}-{number}", {**_role(role), **_port(settings, place), **own})
        for place, (role, number) in enumerate(names)
    ]


def describe(settings: Settings) -> str:
    """Return in words what runs: "2 workers", "1 prefill and 2 decode workers"."""
    if settings.prefill:
        return f"{settings.prefill} prefill and {settings.decode} decode workers"
    return "1 worker" if settings.workers == 1 else f"{settings.workers} workers"


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
    if not settings.prefill:
        if settings.role in ("prefill", "decode"):
            raise ConfigError(
                f"--role {settings.role} alone serves nobody: give --prefill and --decode instead,"
                f" or add a worker to those that run with `baton worker --role {settings.role}`"
            )
        return [("worker", number) for number in range(settings.workers)]
    if settings.role != "auto":
        raise ConfigError(f"--prefill and --decode say what workers do: drop --role {settings.role}")
    return [("prefill", number) for number in range(settings.prefill)] + [
        ("decode", number) for number in range(settings.decode)
    ]


def _role(role: str) -> dict[str, str]:
    return {} if role == "worker" else {"BATON_ROLE": role}


def _port(settings: Settings, place: int) -> dict[str, str]:
    base = settings.system_port
    return {"BATON_SYSTEM_PORT": str(base + place)} if base else {}


def _share_of_cores(settings: Settings, cores: int, workers: int) -> dict[str, str]:
    """Workers that share a machine share its cores: more threads than cores wait for each other."""
    if settings.torch.threads or workers == 1:
        return {}
    return {"BATON_TORCH_THREADS": str(max(1, cores // workers))}
