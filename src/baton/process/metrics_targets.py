"""Where Prometheus finds the metrics of a deployment: the processes of one `baton serve`, with their addresses."""

from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from baton.config.directories import process_directory
from baton.config.environment import process_name
from baton.config.settings import Settings
from baton.control.process_entries import ProcessEntry, read_all_entries
from baton.edge.own_routes import Target
from baton.errors import ConfigError


def deployment_targets(settings: Settings) -> Callable[[], Sequence[Target]]:
    """Return a function that lists this frontend, and the other processes of its `baton serve`. It reads files."""
    own_name = process_name() or "frontend"
    deployment, _, name = own_name.rpartition("/")
    scheme = "https" if settings.tls_certificate else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    frontend = Target((_address(host, settings.port),), {"process": name, "__scheme__": scheme})

    def targets() -> Sequence[Target]:
        return [frontend, *(_target(entry) for entry in _entries(deployment))]

    return targets


def _entries(deployment: str) -> list[ProcessEntry]:
    """Return the entries of a deployment, also of processes that were killed and have not been started again."""
    if not deployment:
        return []
    try:
        entries = read_all_entries(process_directory())
    except ConfigError:  # no home directory
        return []
    return [entry for entry in entries if entry.name.startswith(f"{deployment}/")]


def _target(entry: ProcessEntry) -> Target:
    url = urlsplit(entry.url)
    return Target((_address(url.hostname or "", url.port or 80),), {"process": entry.short_name, "__scheme__": "http"})


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
