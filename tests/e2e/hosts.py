"""Baton on three hosts: prefill, decode, and frontend with router, etcd and NATS. Each process is started by itself.

Addresses are not configured, except those of etcd and NATS. A process that fails is started again, as systemd or
Kubernetes does.
"""

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from baton.config.directories import native_directory
from tests.certificates import Authority
from tests.e2e.harness import BATON, LOAD_S, START_S, STOP_S, System, environment, eventually, running
from tests.e2e.network import Host, Network

PREFILL, DECODE, ROUTER = 0, 1, 2
API_PORT, SYSTEM_PORT, ETCD_PORT, NATS_PORT, KUBERNETES_PORT = 8000, 9090, 2379, 4222, 6443
RESTART_S = 0.5
LISTENING = "0A"  # in /proc/net/tcp
TOKEN = "of-the-operator"


class Service:
    """A program on a host that is started again when it fails, until it is stopped."""

    def __init__(self, host: Host, command: list[str], output: Path, settings: Mapping[str, str] | None = None) -> None:
        self.host = host
        self.output = output
        self.codes: list[int] = []
        self._command = host.command(*command)
        self._environment = environment(settings)
        self._wanted = True
        self._changed = threading.Condition()
        self.popen = self._start()
        threading.Thread(target=self._restart, daemon=True).start()

    @property
    def pid(self) -> int:
        """The process that runs now."""
        return self.popen.pid

    def stop(self) -> int:
        """End it by SIGTERM; return its exit code."""
        self._let_go()
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(STOP_S)

    def down(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Kill it, and start it again after `seconds`, and after `meanwhile`."""
        self._let_go()
        self.popen.kill()
        self.popen.wait(10)
        time.sleep(seconds)
        meanwhile()
        with self._changed:
            self._wanted = True
            self.popen = self._start()
            self._changed.notify()

    def close(self) -> None:
        """End it, whatever it does."""
        self._let_go()
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(30)

    def _let_go(self) -> None:
        with self._changed:
            self._wanted = False

    def _start(self) -> "subprocess.Popen[bytes]":
        with self.output.open("ab") as log:
            return subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )

    def _restart(self) -> None:
        while True:
            ended = self.popen
            code = ended.wait()
            time.sleep(RESTART_S)
            with self._changed:
                self._changed.wait_for(lambda: self._wanted)
                if self.popen is ended:  # `down` has not started it again
                    self.codes.append(code)
                    self.popen = self._start()


class Hosts(System):
    """A prefill and a decode worker, and a frontend, each on a host of its own; with a topology, a router too."""

    def __init__(
        self,
        directory: Path,
        network: Network,
        *arguments: str,
        settings: Mapping[str, Any] | None = None,
        topology: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
        authority: Authority | None = None,
        kubernetes: bool = False,
    ) -> None:
        self.directory = directory
        self.namespace = "baton"
        self.start_timeout_s = LOAD_S
        self.workers = 3 if topology else 2
        self.prefill_host, self.decode_host, self.front = (
            network.host(name) for name in ("prefill", "decode", "front")
        )
        self.address, self.port = self.front.address, API_PORT
        self.url = f"http://{self.address}:{API_PORT}"
        self.system_ports = [SYSTEM_PORT] * self.workers
        self._tags = dict(tags or {})
        self._tls = authority.issue(directory, "baton", [self.front.address]) if authority is not None else None
        self._file = directory / "cluster.yaml"
        self._file.write_text(yaml.safe_dump(self._settings(settings or {})))
        self._topology = directory / "pools.yaml"
        self._topology.write_text(yaml.safe_dump(dict(topology or {})))
        running.append(self)
        self.services: dict[str, Service] = {}
        self._kubernetes = kubernetes
        self.api_record = directory / "api.jsonl"
        if kubernetes:
            self._start_api()
        else:
            self._start_stores()
        names = {"prefill": "baton-prefill-all", "decode": "baton-decode-all"} if topology else {}
        self._start("prefill", self.prefill_host, "worker", "--role", "prefill", *_in(names, "prefill"), *arguments)
        self._start("decode", self.decode_host, "worker", "--role", "decode", *_in(names, "decode"), *arguments)
        if topology:
            model = arguments[arguments.index("--model") : arguments.index("--model") + 2]
            self._start("router", self.front, "router", "run", "--topology", str(self._topology), *model)
        self._start("frontend", self.front, "frontend", "--host", self.front.address)

    def _settings(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the one settings file that every host has."""
        runtime = {"discovery": "etcd", "etcd": self.etcd_url, "nats": f"nats://{self.front.address}:{NATS_PORT}"}
        if self._tls is not None:
            runtime["nats"] = runtime["nats"].replace("nats:", "tls:")
            runtime |= {f"tls_{name}": str(path) for name, path in self._tls._asdict().items()}
        return {
            "runtime": {**runtime, **changes.get("runtime", {})},
            "system_host": "0.0.0.0",
            "system_port": SYSTEM_PORT,
            "control_token": TOKEN,
            **{key: value for key, value in changes.items() if key != "runtime"},
        }

    def _start_stores(self) -> None:
        """Start etcd and NATS next to the frontend, as its settings name them."""
        client, peer = self.etcd_url, f"http://127.0.0.1:{ETCD_PORT + 1}"
        etcd = {
            "data-dir": str(self.directory / "etcd"),
            "log-level": "warn",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
        }
        nats = ["-a", self.front.address, "-p", str(NATS_PORT), "-js", "-sd", str(self.directory / "nats")]
        if self._tls is not None:
            ca, certificate, key = map(str, self._tls)
            etcd |= {"trusted-ca-file": ca, "cert-file": certificate, "key-file": key, "client-cert-auth": "true"}
            nats += ["--tlsverify", "--tlscacert", ca, "--tlscert", certificate, "--tlskey", key]
        commands = {"etcd": ["etcd", *(f"--{name}={value}" for name, value in etcd.items())]}
        commands["nats-server"] = ["nats-server", *nats]
        for name, command in commands.items():
            self.services[name] = Service(self.front, command, self.directory / f"{name}.log")
        for port in (ETCD_PORT, NATS_PORT):
            eventually(lambda p=port: listens(self.front.address, p), START_S, "etcd and NATS listen")

    def _start_api(self) -> None:
        """Start the API of a cluster whose pods are the processes, and the file by which they find it."""
        module = [sys.executable, "-m", "tests.doubles.kubernetes_api", self.front.address, str(KUBERNETES_PORT)]
        command = [*module, str(self.api_record), "prefill", "decode", "frontend"]
        self.services["api"] = Service(self.front, command, self.directory / "api.log")
        cluster = {"name": "test", "cluster": {"server": f"http://{self.front.address}:{KUBERNETES_PORT}"}}
        context = {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "default"}}
        access = {"clusters": [cluster], "contexts": [context], "users": [{"name": "test", "user": {}}]}
        kind = {"apiVersion": "v1", "kind": "Config", "current-context": "test"}
        (self.directory / "kubeconfig").write_text(yaml.safe_dump({**kind, **access}))
        eventually(lambda: listens(self.front.address, KUBERNETES_PORT), START_S, "the API listens")

    def _pod(self, name: str) -> dict[str, str]:
        """Return the variables of a pod."""
        if not self._kubernetes:
            return {}
        return {
            "BATON_RUNTIME_DISCOVERY": "kubernetes",
            "KUBECONFIG": str(self.directory / "kubeconfig"),
            "KUBERNETES_SERVICE_HOST": self.front.address,
            "POD_NAME": name,
            "POD_NAMESPACE": "default",
            "POD_UID": f"uid-of-{name}",
        }

    def _start(self, name: str, host: Host, *arguments: str) -> None:
        """Start a `baton` process on a host, with a cache directory that other hosts do not see."""
        cache = self.directory / host.name
        compiled = native_directory()
        if compiled.exists() and not cache.exists():  # compiling takes a minute
            shutil.copytree(compiled, cache / "baton" / compiled.name)
        own = {"XDG_CACHE_HOME": str(cache), **self._tags, **self._pod(name)}
        command = [BATON, *arguments, "--config", str(self._file)]
        self.services[name] = Service(host, command, self.directory / f"{name}.log", own)

    @property
    def etcd_url(self) -> str:
        """The address of etcd, as all hosts see it."""
        return f"{'http' if self._tls is None else 'https'}://{self.front.address}:{ETCD_PORT}"

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts of prefill, decode and router."""
        return self.prefill_host, self.decode_host, self.front

    def system(
        self, path: str, worker: int = 0, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """See `System.system`."""
        url = f"http://{self.hosts[worker].address}:{SYSTEM_PORT}{path}"
        request = urllib.request.Request(
            url, data=body, headers={"Authorization": f"Bearer {TOKEN}", **(headers or {})}
        )
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read().decode()

    def wait_ready(self) -> None:
        """See `System.wait_ready`."""
        for worker in range(self.workers):
            eventually(lambda w=worker: self.health(w) == 200, self.start_timeout_s, f"process {worker} is ready")
        eventually(self.is_ready, self.start_timeout_s, "the model is listed")
        eventually(self._answers, self.start_timeout_s, "a request is answered")

    def _answers(self) -> bool:
        """Whether a small request is answered: a model is listed a little before its workers can be selected."""
        (model,) = json.loads(self.get("/v1/models")[1])["data"]
        return self.post("/v1/completions", {"model": model["id"], "prompt": "Hello", "max_tokens": 1})[0] == 200

    def lose_etcd_data(self) -> None:
        """Restart etcd with an empty directory, as a volume that was lost."""
        self.services["etcd"].down(0.0, lambda: shutil.rmtree(self.directory / "etcd"))

    def listening(self, name: str) -> set[tuple[str, int]]:
        """Return the IPv4 addresses and ports that a process listens on."""
        process = Path(f"/proc/{self.services[name].pid}")
        sockets = {_target(file) for file in (process / "fd").iterdir()}
        rows = [line.split() for line in (process / "net" / "tcp").read_text().splitlines()[1:]]
        own = [row[1] for row in rows if row[3] == LISTENING and f"socket:[{row[9]}]" in sockets]
        return {_address(text) for text in own}

    def stop(self) -> None:
        """Stop as a person does, workers first; everything ends well."""
        for name in ("prefill", "decode", "router", "frontend"):
            if name in self.services:
                code = self.services[name].stop()
                assert code == 0, f"{name} ended with {code}"

    def close(self) -> None:
        """See `System.close`."""
        running.remove(self)
        with ExitStack() as stack:  # all of them, whatever happens to one
            for service in self.services.values():
                stack.callback(service.close)


@contextmanager
def starting(directory: Path, network: Network, *flags: str) -> Iterator[Callable[..., Hosts]]:
    """A function that starts `Hosts` with these flags of the workers, and waits until they serve."""
    started: list[Hosts] = []

    def start(**options: Any) -> Hosts:
        started.append(Hosts(directory, network, *flags, **options))
        started[-1].wait_ready()
        return started[-1]

    try:
        yield start
    finally:
        for hosts in started:
            hosts.close()


def listens(address: str, port: int) -> bool:
    """Return True if a connection is accepted. Raises OSError if not."""
    with socket.create_connection((address, port), 1):
        return True


def _address(text: str) -> tuple[str, int]:
    """Read an address and a port of /proc/net/tcp."""
    address, _, port = text.partition(":")
    return socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)


def _target(file: Path) -> str:
    """Return what an open file is; empty if it was closed meanwhile."""
    try:
        return str(file.readlink())
    except FileNotFoundError:
        return ""


def _in(namespaces: Mapping[str, str], role: str) -> tuple[str, ...]:
    return ("--namespace", namespaces[role]) if role in namespaces else ()
