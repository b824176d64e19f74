"""Tells those that look at a deployment where its processes are, where they are on several hosts.

On one host with file discovery the entries of `control/process_entries.py` do that, without an endpoint.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec

from baton.config.settings import Settings
from baton.ports.runtime import Context, Service
from baton.process.process_reports import own_name
from baton.protocol.locations import ProcessLocation

LOCATION_PATH = "baton-processes.process.location"
WILDCARDS = ("0.0.0.0", "::", "")

Serve = Callable[[str, Service[None, ProcessLocation]], Awaitable[object]]


async def serve_location(serve: Serve, settings: Settings, role: str, url: str) -> None:
    """Serve where this process is, unless it is on one host with all others. Raises ConfigError."""
    if settings.runtime.discovery != "file":
        location = ProcessLocation(name=own_name(role), namespace=settings.namespace, url=url)
        await serve(LOCATION_PATH, location_service(location))


def location_service(location: ProcessLocation) -> Service[None, ProcessLocation]:
    """Return a service that replies with `location`."""

    async def reply(_: None, context: Context) -> AsyncGenerator[ProcessLocation, None]:
        yield location

    return Service(reply, lambda _: None, msgspec.to_builtins)


def system_url(settings: Settings) -> str:
    """Return the URL of the system server for other hosts; its port has been chosen."""
    return http_url(reachable_host(settings.system_host, settings), settings.system_port)


def reachable_host(host: str, settings: Settings) -> str:
    """Return the address that others reach a listener on `host` at: on all interfaces, the one of the runtime."""
    return settings.runtime.bind if host in WILDCARDS else host


def http_url(host: str, port: int, scheme: str = "http") -> str:
    """Return a URL; an IPv6 address gets its brackets."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
