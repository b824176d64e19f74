"""Which URLs and addresses a worker may fetch for its clients: pure checks before every connection.

A worker fetches a client's URL from inside its own network (server-side request forgery). So it only connects to public
addresses, unless the operator allows others.
"""

import ipaddress

from yarl import URL

from baton.config.media import MediaOptions
from baton.errors import ConfigError

SCHEMES = ("http", "https")
# IPv6 addresses that a gateway translates into the IPv4 address in their last four bytes.
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Refused(Exception):
    """The policy refuses a URL or an address; the message is the reason for the client."""


class Policy:
    """The parsed options. Raises ConfigError for an invalid network."""

    def __init__(self, options: MediaOptions) -> None:
        self.options = options
        self._domains = tuple(name.strip().lower().strip(".") for name in options.domains.split(",") if name.strip())
        self._networks = tuple(_network(text.strip()) for text in options.private.split(",") if text.strip())

    def check_url(self, url: URL) -> None:
        """Raise Refused unless `url` may be fetched. Host names are checked again when they are resolved."""
        if url.scheme not in SCHEMES:
            raise Refused("only http, https and data URLs are supported")
        host = (url.raw_host or "").rstrip(".")
        if not host:
            raise Refused("the URL has no host")
        if url.user is not None or url.password is not None:
            raise Refused("the URL contains a user name or password")
        if not self._allows_host(host):
            raise Refused(f"{host} is not an allowed media host")
        if _is_numeric(host):
            self.check_address(host)

    def _allows_host(self, host: str) -> bool:
        return not self._domains or any(host == name or host.endswith(f".{name}") for name in self._domains)

    def check_address(self, address: str) -> None:
        """Raise Refused unless a connection to `address` is allowed."""
        try:
            parsed = _effective(ipaddress.ip_address(address.partition("%")[0]))
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


def _is_numeric(host: str) -> bool:
    """Return whether `host` is used without a lookup. Some of these, like 127.1, are not valid addresses."""
    return ":" in host or host.replace(".", "").isdigit()


def _effective(address: Address) -> Address:
    """Return the address that packets are delivered to: some IPv6 addresses embed an IPv4 address."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else address)
