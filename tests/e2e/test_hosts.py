"""Prefill, decode and frontend on hosts of their own: addresses are found, texts are those of one process, and a host
or etcd that is away for a while costs no request its end."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from baton.transfer import nixl
from tests.e2e.disagg_load import (
    BOUND_S,
    EXACT,
    NO_REPLY,
    QUICK,
    Load,
    Question,
    assert_nothing_held,
    letters,
    make_questions,
    reference,
)
from tests.e2e.harness import Serve, eventually
from tests.e2e.hosts import DECODE, Hosts, starting
from tests.e2e.network import network

pytestmark = [pytest.mark.e2e, pytest.mark.cluster, pytest.mark.faults, pytest.mark.timeout(600)]

__all__ = ["letters"]  # a fixture

CLIENTS = 3
FLAGS = (*EXACT, *QUICK, "--torch-threads", "1")
LEASE_S = 120.0  # until etcd has dropped the entry of a host, and the frontend the model
AWAY_S = 20.0
UNAVAILABLE = (503, 504)
# What a router needs besides: pools that its workers are in, by the names of their namespaces.
TOPOLOGY: dict[str, Any] = {
    "mode": "disaggregated",
    "prefill": {"pools": [{"name": "all"}]},
    "decode": {"pools": [{"name": "all"}]},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tcp": {"settings": {"kv": {"transports": "tcp"}}},
    "auto": {"settings": {"router": "kv"}},
    "nixl": {"settings": {"kv": {"transports": "nixl"}}, "tags": {"UCX_TLS": "tcp"}},
    "nats": {"settings": {"runtime": {"requests": "nats", "events": "nats"}, "router": "kv"}},
    "router": {"settings": {"kv": {"handoff": "late"}}, "topology": TOPOLOGY},
}


@pytest.fixture(scope="module")
def texts(start_shared: Callable[..., Serve], letters: Path) -> dict[Question, str]:
    """What one process says."""
    missing = [name for name in ("etcd", "nats-server") if shutil.which(name) is None]
    if missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"not installed: {', '.join(missing)}")
    serve = start_shared(Serve, "--model", str(letters), *EXACT, "--torch-threads", "1", engine="torch")
    answers = reference(serve, make_questions(24, prompt=(20, 900), tokens=(4, 60)))
    serve.stop()
    return answers


@pytest.fixture
def deploy(tmp_path: Path, letters: Path, texts: dict[Question, str]) -> Iterator[Callable[..., Hosts]]:
    """Start on three hosts."""
    with network() as joined, starting(tmp_path, joined, "--model", str(letters), *FLAGS) as start:
        yield start


@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_are_those_of_one_process(deploy: Callable[..., Hosts], texts: dict[Question, str], layout: str) -> None:
    if layout == "nixl" and not nixl.available():
        pytest.skip("NIXL is not installed")
    hosts = deploy(**LAYOUTS[layout])
    with Load(hosts, texts, CLIENTS) as load:
        load.flow(30)
    assert load.bad() == [], load.summary()
    assert_nothing_held(hosts, prefill=1)
    moved = {
        name: hosts.metric("baton_transfer_bytes_total", DECODE, transport=name) for name in ("shm", "tcp", "nixl")
    }
    expected = "nixl" if nixl.available() and layout != "tcp" else "tcp"  # shm does not reach another host
    assert [name for name, count in moved.items() if count] == [expected]
    hosts.stop()


def test_processes_announce_addresses_that_other_hosts_reach(deploy: Callable[..., Hosts]) -> None:
    hosts = deploy(settings={"router": "kv"})
    for name in ("prefill", "decode", "frontend"):
        own = hosts.services[name].host.address
        listening = {address for address, _ in hosts.listening(name)}
        assert own in listening, name
        assert listening <= {own, "127.0.0.1", "0.0.0.0"}, name  # 0.0.0.0: events, and the system server
    hosts.stop()


@pytest.mark.parametrize("name", ["prefill", "decode", "front"])
def test_a_host_that_is_cut_off_and_back_costs_no_request_its_end(
    deploy: Callable[..., Hosts], texts: dict[Question, str], name: str
) -> None:
    """Requests meanwhile fail with a status that says so, and nothing is left of them on any host."""
    hosts = deploy(settings={"kv": {"transports": "tcp"}})
    host = {"prefill": hosts.prefill_host, "decode": hosts.decode_host, "front": hosts.front}[name]
    with Load(hosts, texts, CLIENTS) as load:
        load.flow(10)
        before = len(load.answers)
        host.cut()
        if name == "front":
            time.sleep(AWAY_S)  # the clients are cut off too
        else:
            eventually(lambda: not hosts.is_ready(), LEASE_S, "the model is gone")
        host.heal()
        eventually(hosts.is_ready, BOUND_S, "the model is back")
        load.flow(20)
    errors = load.bad(*UNAVAILABLE)
    assert name == "front" or errors, "requests were sent meanwhile"
    assert len(load.answers) > before
    assert_nothing_held(hosts, prefill=1)
    hosts.stop()


def test_etcd_that_restarts_is_not_noticed(deploy: Callable[..., Hosts], texts: dict[Question, str]) -> None:
    hosts = deploy(settings={"kv": {"transports": "tcp"}})
    with Load(hosts, texts, CLIENTS) as load:
        load.flow(10)
        hosts.services["etcd"].down(3.0)
        load.flow(20)
    assert load.bad() == [], load.summary()
    assert [hosts.services[name].codes for name in ("prefill", "decode", "frontend")] == [[], [], []]
    assert_nothing_held(hosts, prefill=1)
    hosts.stop()


def test_workers_register_again_when_etcd_has_lost_its_data(
    deploy: Callable[..., Hosts], texts: dict[Question, str]
) -> None:
    hosts = deploy(settings={"kv": {"transports": "tcp"}})
    with Load(hosts, texts, CLIENTS) as load:
        load.flow(10)
        hosts.lose_etcd_data()
        eventually(lambda: hosts.services["decode"].codes, BOUND_S, "a worker restarts")
        eventually(hosts.is_ready, BOUND_S, "the model is back")
        load.flow(20)
    load.bad(*UNAVAILABLE, 404, NO_REPLY)  # the frontend restarts too, before there is a model
    assert_nothing_held(hosts, prefill=1)
    hosts.stop()
