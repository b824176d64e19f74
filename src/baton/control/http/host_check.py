"""The `Host` header of requests to a system server on loopback.

A web page can make its own name resolve to a loopback address, and so read what listens there (DNS rebinding). Its name
is in the header.
"""

import ipaddress
import re

_PORT = re.compile(r":\d*$")


def is_own_host(header: str, address: str, name: str) -> bool:
    """Whether a request with this header may reach a server that listens on `address`, configured as `name`.

    On loopback, the header must name loopback, or be absent, which it is in no browser. Servers on other addresses are
    reached by names that they do not know.
    """
    if not header or not ipaddress.ip_address(address).is_loopback:
        return True
    host = _PORT.sub("", header).lower().strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", name.lower())
