"""etcd and NATS, where the settings use them, and the clock."""

import ctypes
import json
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from urllib.parse import urlsplit

import msgspec

from baton import __version__
from baton.config.load import listed
from baton.config.peer_tls import peer_tls
from baton.config.settings import Settings
from baton.doctor.findings import Finding, note, ok, problem

TIMEOUT_S = 5.0
MAX_CLOCK_DIFFERENCE_S = 5.0
OLDEST_YEAR = 2025
STA_UNSYNC = 0x40
MAX_INFO_BYTES = 64 << 10

Json = dict[str, object]


def check_etcd(settings: Settings) -> Iterator[Finding]:
    """Check that etcd answers and is healthy, and that its clock agrees with ours."""
    if settings.runtime.discovery != "etcd":
        yield note("etcd", f"not used: --runtime-discovery is {settings.runtime.discovery}")
        return
    tls = peer_tls(settings.runtime)
    for address in listed(settings.runtime.etcd):
        yield from _check_etcd_at(address, tls.client if tls is not None else None)


def _check_etcd_at(address: str, tls: ssl.SSLContext | None) -> Iterator[Finding]:
    start = "start it (etcd --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379)"
    try:
        version, _ = _get_json(f"{address.rstrip('/')}/version", tls)
        health, date = _get_json(f"{address.rstrip('/')}/health", tls)
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        yield problem(
            "etcd", f"{address} does not answer: {reason}", f"{start}, or give its address with --runtime-etcd"
        )
        return
    if str(health.get("health")).lower() != "true":
        yield problem("etcd", f"{address} is not healthy: {health}", f"etcdctl --endpoints {address} endpoint status")
        return
    yield ok("etcd", f"{address} is healthy, version {version.get('etcdserver', 'unknown')}")
    if date is not None and (off_s := abs((datetime.now(UTC) - date).total_seconds())) > MAX_CLOCK_DIFFERENCE_S:
        yield problem(
            "clock", f"it differs by {off_s:.0f} s from that of etcd at {address}", "timedatectl set-ntp true"
        )


def check_nats(settings: Settings) -> Iterator[Finding]:
    """Check that NATS answers, and that it has JetStream."""
    used = [name for name in ("requests", "events") if getattr(settings.runtime, name) == "nats"]
    if not used:
        yield note("nats", "not used: --runtime-requests and --runtime-events have other transports")
        return
    for address in listed(settings.runtime.nats):
        yield from _check_nats_at(address, " and ".join(used))


def _check_nats_at(address: str, used: str) -> Iterator[Finding]:
    mend = "start it with JetStream (nats-server -js)"
    try:
        info = _nats_info(address)
    except (OSError, ValueError) as error:
        yield problem("nats", f"{address} does not answer: {error}", f"{mend}, or give its address with --runtime-nats")
        return
    text = f"{address} answers, version {info.get('version', 'unknown')}, used for {used}"
    if info.get("jetstream") is True:
        yield ok("nats", f"{text}, with JetStream")
    else:
        yield problem("nats", f"{text}, without JetStream, which keeps KV events", mend)


def check_clock(_: Settings) -> Iterator[Finding]:
    """Check that the clock is plausible and synchronized: traces and TLS certificates of several hosts need it."""
    now = datetime.now(UTC)
    if now.year < OLDEST_YEAR:
        yield problem("clock", f"it is {now:%Y-%m-%d %H:%M} UTC", "timedatectl set-ntp true")
        return
    if _is_synchronized() is False:
        text = "the kernel has no synchronized time: only several hosts need it"
        yield note("clock", f"{now:%Y-%m-%d %H:%M:%S} UTC; {text} (timedatectl set-ntp true)")
    else:
        yield ok("clock", f"{now:%Y-%m-%d %H:%M:%S} UTC, {time.tzname[0]}")


def _is_synchronized() -> bool | None:
    """Whether the kernel's clock follows a time server; None if that is not known."""
    state = ctypes.create_string_buffer(512)  # struct timex; `modes` is 0, so that it is only read
    try:
        result = ctypes.CDLL(None).adjtimex(state)
    except (OSError, AttributeError):
        return None
    status = int.from_bytes(state.raw[40:44], "little")
    return None if result < 0 else not status & STA_UNSYNC


def _get_json(url: str, tls: ssl.SSLContext | None) -> tuple[Json, datetime | None]:
    """Return the body of a reply and the time of the server.

    Raises OSError, HTTPException for what is no HTTP, or ValueError for another body.
    """
    request = urllib.request.Request(url, headers={"User-Agent": f"baton/{__version__}"})
    https = [urllib.request.HTTPSHandler(context=tls)] if tls is not None else []
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), *https)
    try:
        with direct.open(request, timeout=TIMEOUT_S) as reply:
            body, date = reply.read(), reply.headers.get("Date")
    except urllib.error.HTTPError as error:
        with error:
            body, date = error.read(), None
    return msgspec.json.decode(body, type=Json), parsedate_to_datetime(date) if date else None


def _nats_info(address: str) -> Json:
    """Return what a NATS server says first to every client. Raises OSError or ValueError."""
    url = urlsplit(address if "://" in address else f"nats://{address}")
    with socket.create_connection((url.hostname or "127.0.0.1", url.port or 4222), TIMEOUT_S) as connection:
        line = connection.makefile("rb").readline(MAX_INFO_BYTES)
    word, _, content = line.partition(b" ")
    if word != b"INFO":
        raise ValueError("it is not a NATS server")
    info: Json = json.loads(content)
    return info
