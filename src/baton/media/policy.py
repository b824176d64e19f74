"""Which URLs a worker may fetch for its clients: pure checks before every connection.

A worker fetches a client's URL from inside its own network (server-side request forgery). So it only connects to public
addresses, unless the operator allows others.
"""

import ipaddress
import re

from yarl import URL

from baton.config.media import MediaOptions
from baton.errors import ConfigError
from baton.media.addresses import Network, effective, is_allowed, is_public

SCHEMES = ("http", "https")
# A last label that resolvers read as a number makes the host an IPv4 address in one of many notations.
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")


class Refused(Exception):
    """A URL, an address or what was read is refused; the message is the reason for the client."""


def refuse_large(size: int, limit: int) -> None:
    """Raise Refused if `size` bytes exceed the limit of an item."""
    if size > limit:
        raise Refused(f"it is larger than the limit of {limit} bytes")


class Policy:
    """The parsed options. Raises ConfigError for an invalid network or domain."""

    def __init__(self, options: MediaOptions) -> None:
        self.options = options
        self._domains = tuple(_domain(name) for name in _listed(options.domains))
        self._networks = tuple(_network(text) for text in _listed(options.private))

    def check_url(self, url: URL) -> None:
        """Raise Refused unless `url` may be fetched. Host names are checked again when they are resolved."""
        if url.scheme not in SCHEMES:
            raise Refused("only http, https, data and file URLs are supported, and no redirect to the latter two")
        host = (url.raw_host or "").rstrip(".")
        if not host:
            raise Refused("the URL has no host")
        if url.user is not None or url.password is not None:
            raise Refused("the URL contains a user name or password")
        if not self._allows_host(host):
            raise Refused(f"{host} is not an allowed media host")
        if _is_numeric(host):
            self.check_address(host)

    def check_address(self, address: str) -> None:
        """Raise Refused unless a connection to `address` is allowed."""
        try:
            parsed = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            raise Refused(f"{address} is not an address; write an IPv4 address as four decimal numbers") from None
        reached = effective(parsed)
        if not is_public(reached) and not is_allowed(reached, self._networks):
            raise Refused("the host's address is not public")

    def _allows_host(self, host: str) -> bool:
        return not self._domains or any(host == name or host.endswith(f".{name}") for name in self._domains)


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _domain(name: str) -> str:
    """Return the domain as URLs have it: lower case, and in ASCII."""
    try:
        host = URL.build(scheme="http", host=name.strip(".")).raw_host
    except ValueError as error:
        raise ConfigError(f"--media-domains: {name}: {error}") from None
    return (host or "").lower()


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigError(f"--media-private: {error}") from None


def _is_numeric(host: str) -> bool:
    """Return whether resolvers take `host` for an address. Only the usual notation of those passes `check_address`."""
    return ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]) is not None
