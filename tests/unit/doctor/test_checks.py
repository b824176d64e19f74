"""Checks of `baton doctor` report what they find, and do not end it."""

import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from baton.config.runtime import RuntimeOptions
from baton.config.settings import Settings
from baton.doctor.findings import Finding
from baton.doctor.hardware import check_gpu
from baton.doctor.run import run_checks
from baton.doctor.services import check_etcd, check_nats
from tests.certificates import Authority

INFO = b'INFO {"version": "2.10", "jetstream": true}\r\n'


@contextmanager
def greeting(text: bytes) -> Iterator[int]:
    """Yield the port of a server that sends `text` to every connection, as NATS does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(text)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


class Etcd(BaseHTTPRequestHandler):
    """Answers as etcd does."""

    def do_GET(self) -> None:
        """See the base class."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"etcdserver": "3.5", "health": "true"}')

    def log_message(self, *_: object) -> None:
        """See the base class."""


def etcd_at(address: str, **tls: str) -> list[Finding]:
    return list(check_etcd(Settings(runtime=RuntimeOptions(discovery="etcd", etcd=address, **tls))))


def test_an_etcd_that_is_something_else_is_a_problem() -> None:
    with greeting(INFO) as port:
        [finding] = etcd_at(f"http://127.0.0.1:{port}")
    assert finding.level == "problem"
    assert "does not answer" in finding.text


@pytest.mark.process
def test_etcd_is_reached_with_the_certificates_of_the_settings(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue(tmp_path, "etcd", ["127.0.0.1"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files.certificate, files.key)
    with HTTPServer(("127.0.0.1", 0), Etcd) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        address = f"https://127.0.0.1:{server.server_port}"
        given = {"tls_ca": str(files.ca), "tls_certificate": str(files.certificate), "tls_key": str(files.key)}
        [with_certificates], [without] = etcd_at(address, **given), etcd_at(address)
        server.shutdown()
        thread.join(5)
    assert (with_certificates.level, without.level) == ("ok", "problem"), with_certificates.text


def test_each_address_of_nats_is_checked() -> None:
    with greeting(INFO) as port:
        addresses = f"nats://127.0.0.1:{port},nats://127.0.0.1:{port}"
        findings = list(check_nats(Settings(runtime=RuntimeOptions(events="nats", nats=addresses))))
    assert [each.level for each in findings] == ["ok", "ok"]


@pytest.fixture
def gpu_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, and a torch that is built for the CPU."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'Some GPU, 80 GiB, 570.1'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "version.py").write_text("cuda: Optional[str] = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.mark.process
@pytest.mark.usefixtures("gpu_listed")
@pytest.mark.parametrize(("engine", "level"), [("echo", "warning"), ("sglang", "problem")])
def test_a_torch_without_cuda_is_a_problem_only_where_the_gpu_is_needed(engine: str, level: str) -> None:
    findings = list(check_gpu(Settings(engine=engine)))
    assert [each.level for each in findings] == ["ok", level]


@pytest.mark.process  # the compiler among others
def test_a_check_that_fails_leaves_the_findings_of_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    findings = run_checks(Settings(engine="echo", log_dir=str(tmp_path / ("too-long" * 40))))
    failed = [each for each in findings if "the check itself failed" in each.text]
    assert [(each.subject, each.level) for each in failed] == [("directories", "problem")]
    assert {"python", "cpu", "model"} <= {each.subject for each in findings}
