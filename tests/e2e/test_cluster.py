"""The core of it all once more over etcd and NATS, the way a cluster runs it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.e2e.harness import Cluster, echoed, environment, eventually, free_ports
from tests.e2e.test_lifecycle import CHAT, PROMPT, assert_some_moved, begin, body, moves

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An etcd and a nats-server on loopback; yields the settings that lead to them."""
    missing = [name for name in ("etcd", "nats-server") if shutil.which(name) is None]
    if missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"not installed: {', '.join(missing)}")
    directory = tmp_path_factory.mktemp("services")
    client, peer, nats = (free_ports(3) + offset for offset in range(3))
    commands = {
        "etcd": [
            *("--data-dir", str(directory / "etcd"), "--log-level", "warn"),
            *("--listen-client-urls", f"http://127.0.0.1:{client},http://[::1]:{client}"),
            *("--advertise-client-urls", f"http://127.0.0.1:{client}"),
            *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
            *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"),
            *("--initial-cluster", f"default=http://127.0.0.1:{peer}"),
        ],
        "nats-server": ["-a", "127.0.0.1", "-p", str(nats), "-js", "-sd", str(directory / "nats")],
    }
    started = []
    try:
        for name, arguments in commands.items():
            with (directory / f"{name}.log").open("wb") as log:
                started.append(subprocess.Popen([name, *arguments], stdout=log, stderr=log, cwd=directory))
        for port in (client, nats):
            eventually(lambda p=port: listens(p), 30, "etcd and nats-server listen")
        yield {
            "BATON_RUNTIME_DISCOVERY": "etcd",
            "BATON_RUNTIME_ETCD": f"http://127.0.0.1:{client}",
            "BATON_RUNTIME_NATS": f"nats://127.0.0.1:{nats}",
        }
    finally:
        for process in started:
            process.terminate()
            process.wait(30)


def listens(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 1):
        return True


@pytest.fixture(scope="module", params=["nats", "tcp"])
def settings(request: pytest.FixtureRequest, services: dict[str, str]) -> dict[str, str]:
    """How requests and events travel; everybody finds everybody by etcd."""
    events = {"nats": "nats", "tcp": "zmq"}[request.param]
    # Processes announce the address that reaches etcd: with tcp it is an IPv6 one.
    etcd = services["BATON_RUNTIME_ETCD"].replace("127.0.0.1", "[::1]" if request.param == "tcp" else "127.0.0.1")
    # A namespace of its own, so that nobody finds what another test left in etcd.
    return {
        **services,
        "BATON_RUNTIME_ETCD": etcd,
        "BATON_RUNTIME_REQUESTS": request.param,
        "BATON_RUNTIME_EVENTS": events,
        "BATON_NAMESPACE": f"test-{request.param}",
    }


@pytest.fixture(scope="module")
def cluster(start_shared: Callable[..., Cluster], settings: dict[str, str]) -> Iterator[Cluster]:
    """A frontend and two workers."""
    cluster = start_shared(Cluster, "--echo-pace-ms", "10", workers=2, settings=settings)
    yield cluster
    cluster.stop()


def test_chat_answers(cluster: Cluster) -> None:
    answer = cluster.client().chat.completions.create(**body("Hello, world.", 20))
    assert answer.choices[0].message.content == echoed("Hello, world.", 20)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (13, 20)


def test_models_have_capabilities_by_every_discovery(cluster: Cluster) -> None:
    (model,) = cluster.client().models.list()
    assert model.capabilities["chat"] is True


def test_processes_announce_the_address_that_reaches_etcd(cluster: Cluster, settings: dict[str, str]) -> None:
    expected = "::1" if "[::1]" in settings["BATON_RUNTIME_ETCD"] else "127.0.0.1"
    wildcards = {"::", "0.0.0.0"}  # of the event plane
    for process in (*cluster.processes, cluster.frontend):
        listening = psutil.Process(process.pid).net_connections("inet")
        own = {at.laddr.ip for at in listening if at.status == psutil.CONN_LISTEN} - wildcards
        assert expected in own, f"{process.arguments}: {own}"


def test_streams_answer_from_both_workers(cluster: Cluster) -> None:
    before = [cluster.ended("completed", number) for number in range(2)]
    readers = begin(cluster, 20, 60)
    assert moves(readers, 60) == [0] * 20
    eventually(
        lambda: [cluster.ended("completed", number) for number in range(2)] == [count + 10 for count in before],
        what="both workers have done half of it",
    )


def test_a_wrong_request_is_refused(cluster: Cluster) -> None:
    assert cluster.post(CHAT, body("Hello", 1_048_576))[0] == 400


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_leaving_frees_every_block(cluster: Cluster, stream: bool) -> None:
    before = sum(cluster.ended("cancelled", number) for number in range(2))
    with cluster.open(CHAT, body(PROMPT, 20_000, stream=stream)):
        eventually(lambda: sum(cluster.load(number)["running"] for number in range(2)) == 1, what="it runs")
    cluster.assert_quiet()
    assert sum(cluster.ended("cancelled", number) for number in range(2)) == before + 1


def test_a_worker_told_to_stop_finishes_its_streams_and_comes_back(cluster: Cluster) -> None:
    readers = begin(cluster, 6, 300)
    cluster.processes[0].signal(signal.SIGTERM)
    eventually(lambda: cluster.instances() == 1, what="its instance leaves")
    assert moves(readers, 300) == [0] * 6
    assert cluster.processes[0].wait() == 0
    cluster.processes[0] = cluster.start_worker(0)
    eventually(lambda: cluster.instances() == 2, 30, "it is back")


@pytest.mark.faults
def test_streams_survive_the_death_of_a_worker(start: Callable[..., Cluster], settings: dict[str, str]) -> None:
    name = {"BATON_NAMESPACE": settings["BATON_NAMESPACE"] + "-kill"}
    cluster = start(Cluster, "--echo-pace-ms", "10", workers=2, settings={**settings, **name})
    readers = begin(cluster, 10, 300)
    cluster.processes[0].kill()
    assert_some_moved(readers, 300, at_most=5)
    # Until the lease ends the frontend still knows the dead worker; nobody notices.
    for _ in range(10):
        assert cluster.post(CHAT, body("Hello", 4))[0] == 200
    cluster.stop()


def test_a_discovery_that_does_not_reply_is_given_up(services: dict[str, str]) -> None:
    """A process whose start would hang fails instead, so that it is started again."""
    etcd = services["BATON_RUNTIME_ETCD"]
    command = [sys.executable, "-m", "tests.e2e.silent_discovery", etcd]
    (server,) = (
        found
        for found in psutil.Process().children(recursive=True)
        if found.name() == "etcd" and any(etcd in argument for argument in found.cmdline())
    )
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
    )
    try:
        assert process.stdout is not None
        assert any(line == "ready\n" for line in process.stdout)
        server.suspend()
        output, _ = process.communicate("\n", timeout=60)
    finally:
        server.resume()
        process.kill()
        process.wait(30)
    failures = [line.split()[:2] for line in output.splitlines() if "discovery took longer than 1 s" in line]
    assert failures == [["client", "peer_lost"], ["serve", "peer_lost"], ["register", "peer_lost"]], output
