"""`baton doctor` finds problems that are really there, and names the command that mends each."""

import json
import os
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.engines.echo.engine import MODEL_DIR
from tests.e2e.harness import BATON, environment, eventually, free_ports

pytestmark = [pytest.mark.e2e]

Finding = dict[str, str]


def doctor(
    *arguments: str,
    prefix: tuple[str, ...] = (),
    limit: Callable[[], None] | None = None,
    code: int | None = None,
    **settings: str,
) -> list[Finding]:
    """Return the findings; the exit code is 1 if and only if one is a problem."""
    done = subprocess.run(
        [*prefix, BATON, "doctor", "--engine", "echo", "--port", str(free_ports(1)), *arguments, "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(settings),
        preexec_fn=limit,
        check=False,
    )
    findings: list[Finding] = json.loads(done.stdout)["findings"]
    assert done.returncode == (1 if any(each["level"] == "problem" for each in findings) else 0), done.stderr
    return findings


def one(findings: list[Finding], subject: str, *levels: str) -> Finding:
    """Return the first finding about `subject` of these levels, which has what mends it."""
    found = next((each for each in findings if each["subject"] == subject and each["level"] in levels), None)
    assert found is not None, [each for each in findings if each["subject"] == subject]
    assert found["mend"] or not {"problem", "warning"} & set(levels)
    return found


@pytest.fixture(scope="module")
def healthy() -> list[Finding]:
    """What it finds on this machine."""
    return doctor()


def test_everything_is_looked_at(healthy: list[Finding]) -> None:
    subjects = {each["subject"] for each in healthy}
    assert subjects == {
        *("python", "system", "packages", "engines", "gpu", "cpu", "compiler", "memory", "shared memory", "ports"),
        *("files", "inotify", "etcd", "nats", "clock", "directories", "model"),
    }
    assert not [each for each in healthy if each["level"] == "problem"]
    assert "ai-dynamo-runtime 1.6" in one(healthy, "packages", "ok")["text"]


def test_a_person_reads_lines_and_a_summary() -> None:
    done = subprocess.run(
        [BATON, "doctor", "--engine", "steam", "--port", str(free_ports(1))],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(),
        check=False,
    )
    assert done.returncode == 1
    assert "FAIL  engines" in done.stdout
    assert "mend: --engine echo" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(("1 problem", "2 problem"))


def test_a_taken_port_names_who_has_it() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        found = one(doctor("--port", str(port)), "ports", "problem")
    assert f"pid {os.getpid()}" in found["text"]
    assert found["mend"] == f"baton serve --port {port + 1}"


@pytest.mark.slow
def test_a_taken_system_port() -> None:
    with socket.socket() as listener:
        port = free_ports(2)
        listener.bind(("127.0.0.1", port + 1))
        listener.listen()
        findings = doctor("--system-port", str(port), "--workers", "2")
    assert "--system-port" in one(findings, "ports", "problem")["mend"]


@pytest.mark.slow
def test_few_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = doctor(limit=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)))
    assert "ulimit -n 65536" in one(found, "files", "warning")["mend"]


@pytest.mark.slow
def test_no_compiler() -> None:
    found = one(doctor(CXX="/nowhere/g++"), "compiler", "warning")
    assert "no C++ compiler" in found["text"]
    assert "apt install g++" in found["mend"]
    assert "pip install ziglang" in found["mend"]


@pytest.mark.slow
def test_a_compiler_that_pip_has_installed(tmp_path: Path) -> None:
    assert "clang" in one(doctor(PATH=str(tmp_path), CXX=""), "compiler", "ok")["text"]


@pytest.mark.slow
def test_no_gpu_where_the_settings_need_one() -> None:
    found = doctor("--torch-device", "cuda", PATH="/nowhere")
    assert "nvidia" in one(found, "gpu", "problem")["mend"]


@pytest.mark.slow
def test_an_engine_that_is_not_installed() -> None:
    pytest.importorskip("torch")
    if shutil.which("sglang"):
        pytest.skip("it is installed")
    assert "baton-serve[trtllm]" in one(doctor("--engine", "trtllm"), "engines", "problem")["mend"]


@pytest.fixture
def unshared() -> Callable[[str], tuple[str, ...]]:
    """Return a command before another one, for which a script has changed the machine."""

    def prefix(script: str) -> tuple[str, ...]:
        command = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{script} && exec "$@"', "sh")
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
            pytest.skip("this machine lets no user change that")
        return command

    return prefix


@pytest.mark.slow
def test_no_inotify_instances(unshared: Callable[[str], tuple[str, ...]]) -> None:
    found = doctor(prefix=unshared("echo 0 > /proc/sys/user/max_inotify_instances"))
    assert one(found, "inotify", "problem")["mend"] == "sudo sysctl fs.inotify.max_user_instances=1024"


@pytest.mark.slow
def test_little_shared_memory(unshared: Callable[[str], tuple[str, ...]]) -> None:
    found = doctor(prefix=unshared("mount -t tmpfs -o size=64m none /dev/shm"))
    assert "--shm-size" in one(found, "shared memory", "warning")["mend"]


@pytest.mark.slow
def test_little_room_for_logs(tmp_path: Path, unshared: Callable[[str], tuple[str, ...]]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    prefix = unshared(f'mount -t tmpfs -o size=1m none "{disk}"')
    found = one(doctor("--log-dir", str(disk / "logs"), prefix=prefix), "directories", "warning")
    assert "--log-dir" in found["mend"]
    (tmp_path / "file").write_text("")
    found = one(doctor("--cache-dir", str(tmp_path / "file" / "models")), "directories", "problem")
    assert "--cache-dir" in found["mend"]


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "everything"])
def test_an_incomplete_model(tmp_path: Path, missing: str) -> None:
    model = tmp_path / "model"
    if missing != "everything":
        shutil.copytree(MODEL_DIR, model)
        (model / missing).unlink()
    found = one(doctor(str(model)), "model", "problem")
    assert str(model) in found["text"]
    assert missing in found["text"] or missing == "everything"


@pytest.mark.slow
def test_a_model_without_weights(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = shutil.copytree(MODEL_DIR, tmp_path / "model")
    assert "*.safetensors" in one(doctor(str(model), "--engine", "torch"), "model", "problem")["text"]


@pytest.mark.slow
def test_services_that_do_not_answer() -> None:
    findings = doctor(
        *("--runtime-discovery", "etcd", "--runtime-etcd", "http://127.0.0.1:9"),
        *("--runtime-events", "nats", "--runtime-nats", "nats://127.0.0.1:9"),
    )
    assert "--runtime-etcd" in one(findings, "etcd", "problem")["mend"]
    assert "nats-server -js" in one(findings, "nats", "problem")["mend"]
    assert "not needed" in one(findings, "inotify", "note")["text"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nats-server") is None, reason="nats-server is not installed")
@pytest.mark.parametrize("jetstream", [True, False])
def test_nats_with_and_without_jetstream(tmp_path: Path, jetstream: bool) -> None:
    port = free_ports(1)
    command = ["nats-server", "-a", "127.0.0.1", "-p", str(port), "-sd", str(tmp_path), *(["-js"] if jetstream else [])]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: socket.create_connection(("127.0.0.1", port), 1).close() is None, what="nats-server")
        found = doctor("--runtime-events", "nats", "--runtime-nats", f"nats://127.0.0.1:{port}")
    finally:
        server.kill()
        server.wait(10)
    if jetstream:
        assert "with JetStream" in one(found, "nats", "ok")["text"]
    else:
        assert "nats-server -js" in one(found, "nats", "problem")["mend"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
def test_etcd_that_is_healthy(tmp_path: Path) -> None:
    client, peer = (f"http://127.0.0.1:{free_ports(2) + offset}" for offset in (0, 1))
    flags = ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
    flags += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    server = subprocess.Popen(
        ["etcd", "--data-dir", str(tmp_path), *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        arguments = ("--runtime-discovery", "etcd", "--runtime-etcd", client)
        deadline = time.monotonic() + 30
        while True:
            found = doctor(*arguments)
            if any(each["subject"] == "etcd" and each["level"] == "ok" for each in found):
                break
            assert time.monotonic() < deadline, found
    finally:
        server.kill()
        server.wait(10)
    assert "is healthy, version 3" in one(found, "etcd", "ok")["text"]
