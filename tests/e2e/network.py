"""Hosts as network namespaces, joined by a bridge. The test itself is one more host on that network.

The bridge has a namespace of its own: rules of this machine for bridged packets do not apply there.
"""

import ctypes
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

LINK = "eth0"
CLONE_NEWNET = 0x40000000
ETH_P_ALL = 3


def ip(*arguments: str) -> None:
    """Run `ip`, and fail with what it says."""
    run = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
    assert run.returncode == 0, f"ip {' '.join(arguments)}: {run.stderr.strip()}"


def why_not() -> str | None:
    """Return why this machine cannot have network namespaces, None if it can."""
    if shutil.which("ip") is None:
        return "network namespaces need the program ip (Debian: iproute2)"
    name = f"baton-try-{os.getpid()}"
    added = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=30)
    if added.returncode:
        return f"network namespaces need root: {added.stderr.strip()}"
    ip("netns", "delete", name)
    return None


class Host:
    """A network namespace with a loopback interface and one link to the others."""

    def __init__(self, network: "Network", name: str, number: int) -> None:
        self.name = name
        self.address = f"{network.prefix}.{number}"
        self.namespace = f"{network.name}-{name}"
        self._switch, self._port = network.switch, f"port{number}"
        ip("netns", "add", self.namespace)
        self.run("link", "set", "lo", "up")
        ip("-n", self._switch, "link", "add", self._port, "type", "veth", "peer", LINK, "netns", self.namespace)
        ip("-n", self._switch, "link", "set", self._port, "master", "bridge", "up")
        self.run("address", "add", f"{self.address}/24", "dev", LINK)
        self.run("link", "set", LINK, "up")

    def run(self, *arguments: str) -> None:
        """Run `ip` on this host."""
        ip("-n", self.namespace, *arguments)

    def command(self, *command: str) -> list[str]:
        """Return the command that runs `command` on this host, in the same process."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def cut(self) -> None:
        """Take the host off the network: packets are lost, and nobody is told."""
        ip("-n", self._switch, "link", "set", self._port, "nomaster")

    def heal(self) -> None:
        """Put it on the network again."""
        ip("-n", self._switch, "link", "set", self._port, "master", "bridge")

    def close(self) -> None:
        """Remove it."""
        ip("netns", "delete", self.namespace)


class Network:
    """A bridge, the hosts on it, and a link of this machine to it."""

    def __init__(self) -> None:
        self.name = f"baton-{os.getpid()}-{random.randrange(10_000)}"
        self.switch = f"{self.name}-switch"
        self.prefix = f"198.18.{random.randrange(256)}"  # for tests of networks (RFC 2544)
        self._link = f"bt{random.randrange(16**8):08x}"
        self._hosts: list[Host] = []

    def open(self) -> None:
        """Make the bridge, with the test at address 1."""
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        ip("link", "add", self._link, "type", "veth", "peer", "test", "netns", self.switch)
        ip("-n", self.switch, "link", "set", "test", "master", "bridge", "up")
        ip("address", "add", f"{self.prefix}.1/24", "dev", self._link)
        ip("link", "set", self._link, "up")

    def host(self, name: str) -> Host:
        """Add a host."""
        host = Host(self, name, 11 + len(self._hosts))
        self._hosts.append(host)
        return host

    def packets(self) -> socket.socket:
        """Return a socket that gets every packet between the hosts."""

        def open_on_bridge() -> socket.socket:
            with open(f"/run/netns/{self.switch}") as namespace:
                assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) == 0
            return socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))

        with ThreadPoolExecutor(1) as thread:  # which ends in the namespace, and with it
            return thread.submit(open_on_bridge).result()

    def close(self) -> None:
        """Remove everything; the links go with their namespaces."""
        with ExitStack() as stack:
            stack.callback(ip, "netns", "delete", self.switch)
            for host in self._hosts:
                stack.callback(host.close)


@contextmanager
def network() -> Iterator[Network]:
    """A network that is gone afterwards; skips where there can be none."""
    if (reason := why_not()) is not None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    made = Network()
    try:
        made.open()
        yield made
    finally:
        made.close()
