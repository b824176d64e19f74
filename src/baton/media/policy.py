"""What a worker may fetch for its clients: pure checks, made before every connection.

A client that names a URL makes this worker ask for it, from inside the network that the worker is in. So nothing is
asked of an address that the client could not reach from outside, unless the operator has said so.
"""

import ipaddress

from yarl import URL

from baton.config.media import MediaOptions
from baton.errors import ConfigError

SCHEMES = ("http", "https")
# Addresses of IPv6 that a gateway turns into the IPv4 address in their last four bytes.
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Refused(Exception):
    """It is not fetched; the message says why."""


class Policy:
    """The options, read once. Raises ConfigError for a network that is none."""

    def __init__(self, options: MediaOptions) -> None:
        self.options = options
        self._domains = tuple(name.strip().lower().strip(".") for name in options.domains.split(",") if name.strip())
        self._networks = tuple(_network(text.strip()) for text in options.private.split(",") if text.strip())

    def check_url(self, url: URL) -> None:
        """Raise Refused unless `url` may be asked for, as far as can be told without asking for its address."""
        if url.scheme not in SCHEMES:
            raise Refused("only http, https and data URLs are fetched")
        host = (url.raw_host or "").rstrip(".")
        if not host:
            raise Refused("the URL names no host")
        if url.user is not None or url.password is not None:
            raise Refused("the URL carries a user's name or password")
        if self._domains and not any(host == name or host.endswith(f".{name}") for name in self._domains):
            raise Refused(f"{host} is not among the hosts that media are fetched from")
        if _looks_numeric(host):
            self.check_address(host)

    def check_address(self, address: str) -> None:
        """Raise Refused unless a connection to `address` is allowed."""
        try:
            parsed = _inner(ipaddress.ip_address(address.partition("%")[0]))
        except ValueError:
            raise Refused(f"{address} is not an address") from None
        if any(parsed in network for network in self._networks):
            return
        if not parsed.is_global or parsed.is_multicast:
            raise Refused("the host's address is not public")


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigError(f"--media-private: {error}") from None


def _looks_numeric(host: str) -> bool:
    """Whether `host` would be connected to without being looked up. Some that look so, like 127.1, are no addresses."""
    return ":" in host or host.replace(".", "").isdigit()


def _inner(address: Address) -> Address:
    """Return where packets to `address` end up: some addresses of IPv6 carry one of IPv4."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else address)
