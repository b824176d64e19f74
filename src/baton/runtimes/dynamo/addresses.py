"""The addresses by which processes reach each other."""

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether only this host reaches `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
