"""TLS between hosts: the packets between them reveal nothing, and nobody connects without a certificate."""

import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.transfer.wire import DATA_PREAMBLE, ROOM_PREAMBLE
from tests.certificates import Authority
from tests.e2e.harness import echoed
from tests.e2e.hosts import API_PORT, DECODE, SYSTEM_PORT, Hosts, starting
from tests.e2e.network import Network, network

pytestmark = [pytest.mark.e2e, pytest.mark.cluster, pytest.mark.faults, pytest.mark.timeout(600)]

LIMIT_S = 60.0
PROMPT = "z" * 400
# What the planes say in plain text: the claim of KV, the request for it, an entry in etcd, and the prompt's tokens.
CLAIM, FETCH, ENTRY = ROOM_PREAMBLE, DATA_PREAMBLE, b"v1/instances/"


class Packets:
    """What travels between hosts over TCP, except the API and the system servers."""

    def __init__(self, joined: Network) -> None:
        self.payloads: list[bytes] = []
        self._socket = joined.packets()
        self._socket.settimeout(0.2)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> "Packets":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)
        self._socket.close()

    def has(self, text: bytes) -> bool:
        """Whether a packet has `text` in it."""
        return any(text in payload for payload in self.payloads)

    def _read(self) -> None:
        while not self._over.is_set():
            try:
                frame = self._socket.recv(65536)
            except TimeoutError:
                continue
            if (payload := tcp_payload(frame)) is not None:
                self.payloads.append(payload)


def tcp_payload(frame: bytes) -> bytes | None:
    """Return what a frame carries for our planes, None if it is something else."""
    if frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_TCP:
        return None
    segment = frame[14 + 4 * (frame[14] & 15) :]
    ports = struct.unpack("!HH", segment[:4])
    return None if {API_PORT, SYSTEM_PORT} & set(ports) else segment[4 * (segment[12] >> 4) :]


def tokens() -> tuple[bytes, ...]:
    """Return how the tokens of the prompt may look in a request: one number again and again, as text or in a byte."""
    return tuple(
        part for number in range(3, 128) for part in (b",".join([str(number).encode()] * 60), bytes([number]) * 60)
    )


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[tuple[Network, Callable[..., Hosts], Authority]]:
    with network() as joined, starting(tmp_path, joined, "--engine", "echo") as start:
        yield joined, start, Authority(tmp_path)


@pytest.mark.parametrize("plane", ["tcp", "nats"])
def test_packets_between_hosts_reveal_nothing(
    deployed: tuple[Network, Callable[..., Hosts], Authority], plane: str
) -> None:
    joined, start, authority = deployed
    runtime = {"requests": plane, "events": "nats"}
    with Packets(joined) as packets:
        hosts = start(settings={"runtime": runtime, "router": "kv"}, authority=authority)
        assert_answers(hosts)
        assert hosts.metric("baton_transfer_bytes_total", DECODE, transport="tcp") > 0  # nixl is left out with TLS
    assert len(packets.payloads) > 100
    assert not any(map(packets.has, (CLAIM, FETCH, ENTRY, *tokens())))
    for name in ("prefill", "decode", "frontend"):
        assert "not encrypted" not in hosts.log_of(name), name
    assert_refuses_strangers(hosts, authority)
    hosts.stop()


def test_the_same_packets_are_readable_without_tls(
    deployed: tuple[Network, Callable[..., Hosts], Authority],
) -> None:
    """The reader of packets works."""
    joined, start, _ = deployed
    with Packets(joined) as packets:
        hosts = start(settings={"kv": {"transports": "tcp"}})
        assert_answers(hosts)
    assert all(map(packets.has, (CLAIM, FETCH, ENTRY)))
    assert any(map(packets.has, tokens()))
    hosts.stop()


def assert_answers(hosts: Hosts) -> None:
    status, body = hosts.post("/v1/completions", {"model": "echo", "prompt": PROMPT, "max_tokens": 40})
    assert status == 200, body
    assert json.loads(body)["choices"][0]["text"] == echoed(PROMPT, 40)


def assert_refuses_strangers(hosts: Hosts, authority: Authority) -> None:
    """Every port that a process has opened on its address ends a connection that brings no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority.certificate)
    for name in ("prefill", "decode", "frontend"):
        address = hosts.services[name].host.address
        ports = {port for at, port in hosts.listening(name) if at == address} - {API_PORT}
        assert ports or name == "frontend"
        for port in ports:
            assert is_refused(context, address, port), f"{name}: {port}"


def is_refused(context: ssl.SSLContext, address: str, port: int) -> bool:
    with socket.create_connection((address, port), LIMIT_S) as connection:
        try:
            with context.wrap_socket(connection, server_hostname="baton") as encrypted:
                encrypted.sendall(b"x" * 100)
                return encrypted.recv(1) == b""
        except ssl.SSLError:
            return True
        except ConnectionError:
            return True
