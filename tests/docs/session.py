"""Runs documented commands as a reader would: servers stay up in other terminals, the rest runs one by one.

Ports of the pages are replaced by free ones, and the home directory is a fresh one with the models of the real one.
"""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from baton.config.directories import cache_directory
from baton.config.settings import Settings
from tests.docs.pages import Command
from tests.docs.parsing import simple_commands
from tests.e2e.harness import environment, eventually, free_ports

READY_S = 240.0
COMMAND_S = 120.0
STOP_S = 90.0
SYSTEM_PORTS = 8
_STATE = re.compile(r"\s*(?:\w+=|export |cd )")
_EVENTS = re.compile(r'"\n"content":"')  # between the texts of two events


class Server:
    """A command that runs until it is stopped."""

    def __init__(self, words: list[str], shell: str, log: Path, directory: Path, variables: Mapping[str, str]) -> None:
        self.words = words
        self.log = log
        self.was_ready = False
        self._shell = shell
        self._directory = directory
        self._variables = dict(variables)

    def start(self) -> None:
        """Start it."""
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                ["bash", "-c", self._shell],
                cwd=self._directory,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def kind(self) -> str:
        """What was started: serve, frontend, worker, router, or gateway for an example."""
        match Path(self.words[0]).name:
            case "make":
                return "serve"
            case "python":
                return "gateway"
        return self.words[1]

    def output(self) -> str:
        """Return what it has printed."""
        return self.log.read_text(errors="replace")

    def tree(self) -> list[psutil.Process]:
        """Return its processes."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def interrupt(self) -> None:
        """Stop it as Ctrl-C does, which reaches every process of the terminal; nothing may be left."""
        tree = self.tree()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        code = self.process.wait(STOP_S)
        made = Path(self.words[0]).name == "make"  # make says itself that it was interrupted
        assert code == 0 or (made and code in (2, 130, -signal.SIGINT)), f"ended with {code}: {self.output()[-3000:]}"
        eventually(lambda: not _alive(tree), 15, f"no process is left of {' '.join(self.words)}")

    def kill(self) -> None:
        """End all its processes, for the way out of a failed test."""
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(10)


def _stays(path: Path) -> bool:
    """Whether a file is no rest of a deployment: torch's directory for compiled code, and what brokers lock."""
    return path.name.startswith("torchinductor_") or path.parts[-2:] == ("events", "lock")


def _alive(tree: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in tree if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


class Session:
    """The terminals of one reader, with a home and a working directory of their own."""

    def __init__(self, directory: Path, replaced: Mapping[str, str] | None = None) -> None:
        self.port = free_ports(1)
        self.gateway_port = free_ports(1)
        self.system_port = free_ports(SYSTEM_PORTS)
        self.home, self.work = directory / "home", directory / "work"
        self._directory = directory
        self._replaced = dict(replaced or {})
        self._state: list[str] = []
        self.servers: list[Server] = []
        self.temporary = directory / "tmp"
        for path in (self.home / ".cache" / "baton", self.work, self.temporary):
            path.mkdir(parents=True)
        self.variables = self._environment()

    def _environment(self) -> dict[str, str]:
        places = {"HOME": str(self.home), "TMPDIR": str(self.temporary), "BATON_PORT": str(self.port)}
        variables = environment(places)
        variables.pop("XDG_CACHE_HOME", None)
        variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
        (self.home / ".curlrc").write_text("fail-with-body\n")  # a status of 400 and more is a failure
        return variables

    def use_models(self) -> None:
        """Use the models and the compiled code that this machine has."""
        for name in ("models", "native"):
            real = cache_directory(Settings()) / name
            real.mkdir(parents=True, exist_ok=True)
            (self.home / ".cache" / "baton" / name).symlink_to(real)

    def replace(self, old: str, new: str) -> None:
        """Replace a text of the page in the commands that follow."""
        self._replaced[old] = new

    def translate(self, text: str) -> str:
        """Return a text of a page with the ports, the home and the paths of this session."""
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        for documented, real in ((8000, self.port), (8080, self.gateway_port)):
            text = re.sub(rf"(?<![\d.]){documented}(?!\d)", str(real), text)
        text = re.sub(r"(?<![\d.])909(\d)(?!\d)", lambda found: str(self.system_port + int(found[1])), text)
        return text.replace("~/", f"{self.home}/")

    def run(self, command: Command) -> str:
        """Run a command; return its output. A server is started, and is ready before anything else runs."""
        first = simple_commands(command.text)
        if first and _is_server(first[0]):
            self.start(command)
            return ""
        self.settle()
        return self._run_to_end(command)

    def start(self, command: Command) -> Server:
        """Start a server. Another deployment that runs is stopped first: it has the ports."""
        words = simple_commands(command.text)[0]
        shell = "\n".join([*self._state, f"exec {self.translate(command.text)}"])
        server = Server(words, shell, self._directory / f"server-{command.line}.log", self.work, self.variables)
        if others := [each for each in self.servers if _excludes(server.kind, each.kind)]:
            self.settle()
        for other in others:
            self.stop(other)
        server.start()
        self.servers.append(server)
        return server

    def settle(self, limit_s: float = READY_S) -> None:
        """Wait until every server that was started has been ready. Commands may pause it afterwards."""
        for server in [each for each in self.servers if not each.was_ready]:
            eventually(lambda each=server: self._is_ready(each), limit_s, f"{' '.join(server.words)} is ready")
            server.was_ready = True

    def expect(self, server: Server, shown: tuple[str, ...]) -> None:
        """Wait until a server has printed what the page shows."""
        eventually(lambda: matches(server.output(), self.translate("\n".join(shown))), 30, f"it prints {shown}")

    def stop(self, server: Server) -> None:
        """Stop a server with Ctrl-C."""
        self.servers.remove(server)
        server.interrupt()

    def close(self) -> None:
        """Stop everything, the last one first."""
        for server in reversed(list(self.servers)):
            self.stop(server)

    def processes(self) -> list[psutil.Process]:
        """Return every process that has the home directory of this session, whoever started it."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("HOME") == str(self.home) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def leftovers(self) -> list[str]:
        """Return what a stopped deployment has left: processes, sockets, leases of discovery, tokens, other files."""
        cache = self.home / ".cache" / "baton"
        left = [f"process {process.pid}: {' '.join(process.cmdline())}" for process in self.processes()]
        left += [f"temporary file {path}" for path in self.temporary.rglob("*") if not _stays(path)]
        for name in ("control", "processes", "discovery", "spill"):
            left += [f"file {path}" for path in (cache / name).rglob("*") if not path.is_dir() and not _stays(path)]
        left += [f"socket {path}" for path in self.home.rglob("*") if path.is_socket()]
        return left

    def kill(self) -> None:
        """End everything, for the way out of a failed test."""
        for server in self.servers:
            server.kill()

    def _run_to_end(self, command: Command) -> str:
        text = self.translate(command.text)
        shell = "\n".join(["set -o pipefail", *self._state, text])
        done = subprocess.run(
            ["bash", "-c", shell],
            cwd=self.work,
            env=self.variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"{command.page}:{command.line}: {done.returncode} {done.stdout} {done.stderr}"
        if _STATE.match(text):
            self._state.append(text)
        return done.stdout

    def _is_ready(self, server: Server) -> bool:
        code = server.process.poll()
        assert code is None, f"{' '.join(server.words)} ended with {code}: {server.output()[-3000:]}"
        match server.kind:
            case "serve":
                return bool(_get_json(f"http://127.0.0.1:{self.port}/v1/models").get("data"))
            case "view":
                return "http://" in server.output()
            case "gateway":
                return "status" in _get_json(f"http://127.0.0.1:{self.gateway_port}/health")
            case "frontend":
                return "status" in _get_json(f"http://127.0.0.1:{self.port}/health")
        return any(self._serves(process) for process in server.tree())

    def _serves(self, process: psutil.Process) -> bool:
        entry = self.home / ".cache" / "baton" / "processes" / f"{process.pid}.json"
        return entry.exists() and _get_json(f"{json.loads(entry.read_text())['url']}/health").get("state") == "serving"


def matches(output: str, shown: str) -> bool:
    """Whether an output has what a page shows. `...` stands for anything; times and chosen ports may be others, and a
    busy machine sends the text of several events in one."""
    output, shown = _EVENTS.sub("", output), _EVENTS.sub("", shown)
    pattern = ".*".join(re.escape(part.strip()) for part in re.split(r"\.\.\.", shown.strip()))
    pattern = re.sub(r"\d+\\\.\d+(?!\\\.)", r"[\\d.]+", re.sub(r":[1-9]\d{4}", r":\\d+", pattern))
    return re.search(re.sub(r"(?:\\ |\\\n)+", r"\\s+", pattern), output, re.DOTALL) is not None


def _is_server(words: list[str]) -> bool:
    program = Path(words[0]).name
    if program == "make":
        return words[1:2] == ["serve"]
    if program == "python":
        return words[1].startswith("examples/")
    if program != "baton" or {"--help", "--help-all", "--help-engine"} & set(words):
        return False
    return words[1:2] in (["serve"], ["worker"], ["frontend"], ["view"]) or words[1:3] == ["router", "run"]


def _excludes(starting: str, running: str) -> bool:
    """Whether a server that starts takes the place of one that runs: they would have the same ports."""
    if starting in ("gateway", "view"):
        return False
    return "serve" in (starting, running) or starting == "frontend"


def _get_json(url: str) -> dict[str, object]:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=10) as answer:
            content: dict[str, object] = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            content = json.load(error)
    return content
