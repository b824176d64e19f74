"""Checks that the services of the runtime can be reached. The runtime itself would retry for minutes."""

import asyncio
import os
from urllib.parse import urlsplit

from baton.config.runtime import RuntimeOptions
from baton.errors import ConfigError

CONNECT_TIMEOUT_S = 5.0
_DEFAULT_PORTS = {"etcd": 2379, "NATS": 4222}


async def check_services(options: RuntimeOptions) -> None:
    """Raise ConfigError if a service that `options` use cannot be reached; of several addresses one is enough."""
    if options.discovery == "etcd":
        await _check("etcd", options.etcd, "--runtime-etcd")
    if "nats" in (options.requests, options.events):
        await _check("NATS", options.nats, "--runtime-nats")


async def _check(service: str, addresses: str, flag: str) -> None:
    listed = [address.strip() for address in addresses.split(",") if address.strip()]
    problems = await asyncio.gather(*(_problem(address, _DEFAULT_PORTS[service]) for address in listed))
    if None not in problems:
        reasons = "; ".join(f"{address}: {problem}" for address, problem in zip(listed, problems, strict=True))
        raise ConfigError(
            f"cannot reach {service} ({reasons or 'no address given'}); start it, or give its address with {flag}"
        )


async def _problem(address: str, default_port: int) -> str | None:
    """Return why a connection to `address` fails; None if it succeeds."""
    try:
        url = urlsplit(address)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(url.hostname, url.port or default_port)
    except TimeoutError:
        return f"no connection within {CONNECT_TIMEOUT_S:g} s"
    except OSError as error:
        return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
    except ValueError as error:
        return str(error)
    writer.close()
    return None
