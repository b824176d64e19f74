"""Whether the services that the runtime needs can be reached: asked first, since the runtime would wait for minutes."""

import asyncio
from urllib.parse import urlsplit

from baton.config.runtime import RuntimeOptions
from baton.errors import ConfigError

CONNECT_S = 5.0
_DEFAULT_PORTS = {"etcd": 2379, "NATS": 4222}


async def check_services(options: RuntimeOptions) -> None:
    """Raise ConfigError if a service that `options` name does not answer; of several addresses one is enough."""
    if options.discovery == "etcd":
        await _check("etcd", options.etcd, "--runtime-etcd")
    if "nats" in (options.requests, options.events):
        await _check("NATS", options.nats, "--runtime-nats")


async def _check(service: str, addresses: str, flag: str) -> None:
    reached = await asyncio.gather(
        *(_connects(address, _DEFAULT_PORTS[service]) for address in addresses.split(",") if address.strip())
    )
    if not any(reached):
        raise ConfigError(f"cannot reach {service} at {addresses}; start it, or give its address with {flag}")


async def _connects(address: str, default_port: int) -> bool:
    try:
        url = urlsplit(address.strip())
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(url.hostname, url.port or default_port)
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return True
