"""The address that a process listens on and announces to others.

On one host it is loopback. With discovery beyond one host it is the address of the interface that reaches etcd or the
Kubernetes API, which other hosts reach too.
"""

import os
import socket
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

import msgspec

from baton.config.runtime import RuntimeOptions
from baton.config.settings import Settings
from baton.errors import ConfigError

LOOPBACK = "127.0.0.1"
ETCD_PORT = 2379
HTTPS_PORT = 443

Source = Callable[[str, int], str | None]


def with_addresses(settings: Settings) -> Settings:
    """Return `settings` with every address that was left empty. Blocks while names are resolved. Raises ConfigError."""
    bind = bind_address(settings.runtime)
    host = settings.sglang.host or bind
    if is_loopback(host) and not is_loopback(bind):
        raise ConfigError(
            f"decode workers on other hosts cannot reach {host} (--sglang-host); leave it out to use {bind}"
        )
    return msgspec.structs.replace(
        settings,
        runtime=msgspec.structs.replace(settings.runtime, bind=bind),
        sglang=msgspec.structs.replace(settings.sglang, host=host),
    )


def bind_address(options: RuntimeOptions, source: Source | None = None) -> str:
    """Return `options.bind` if it can be announced, or the address to announce if it is empty. Raises ConfigError.

    `source` returns the address of this host that reaches a host and port, None if none does.
    """
    found = _address_towards_services(options, source or source_address)
    if options.bind:
        _refuse_unannounceable(options, found)
        return options.bind
    if options.discovery == "file":
        return LOOPBACK
    if found is None or _parse(found).is_link_local:
        raise ConfigError(
            f"no address was found that other hosts reach this process at (discovery: {options.discovery}); give one"
            " with --runtime-bind"
        )
    return found


def is_loopback(host: str) -> bool:
    """Whether only this host reaches `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def source_address(host: str, port: int) -> str | None:
    """Return the address of this host from which `host` is reached, None if it is not. Sends nothing to it."""
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in candidates:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def _refuse_unannounceable(options: RuntimeOptions, found: str | None) -> None:
    address = _parse(options.bind)
    if address.is_unspecified:
        raise ConfigError(
            f"other processes cannot connect to {options.bind} (--runtime-bind); give the address of one interface"
        )
    if address.is_loopback and (options.discovery == "kubernetes" or (found is not None and not is_loopback(found))):
        advice = f"leave it out to use {found}" if found is not None else "give one that they reach"
        raise ConfigError(
            f"processes on other hosts cannot reach {options.bind} (--runtime-bind; discovery:"
            f" {options.discovery}); {advice}"
        )


def _parse(address: str) -> IPv4Address | IPv6Address:
    try:
        return ip_address(address)
    except ValueError:
        raise ConfigError(f"{address} is not an IP address (--runtime-bind)") from None


def _address_towards_services(options: RuntimeOptions, source: Source) -> str | None:
    """Return the first address of this host that reaches a service of discovery; None with file discovery."""
    return next((found for host, port in _services(options) if (found := source(host, port)) is not None), None)


def _services(options: RuntimeOptions) -> Iterator[tuple[str, int]]:
    if options.discovery == "etcd":
        for address in options.etcd.split(","):
            try:
                url = urlsplit(address.strip())
                if url.hostname:
                    yield url.hostname, url.port or ETCD_PORT
            except ValueError:
                continue  # the check of the services reports it
    elif options.discovery == "kubernetes" and (host := os.environ.get("KUBERNETES_SERVICE_HOST")):
        yield host, HTTPS_PORT
