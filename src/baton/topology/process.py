"""One supervised process: start, notifications, signals and exit."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from baton.config.directories import control_directory
from baton.config.environment import PROCESS_RESTARTS, SUPERVISOR_PID
from baton.control.http.token_file import remove_token
from baton.errors import ConfigError, EngineDead
from baton.status.sd_notify import RUNNING_REQUESTS, SYSTEM_URL
from baton.topology.log_file import ProcessOutput

LOG_TIMEOUT_S = 1.0


class Process:
    """A `baton` subprocess with its notification socket (see `status/sd_notify.py`).

    Raises ConfigError if there can be no socket at `socket_path`.
    """

    def __init__(
        self, name: str, command: str, variables: dict[str, str], socket_path: Path, output: ProcessOutput
    ) -> None:
        self.name = name
        self.status = ""
        self.system_url = ""
        self.running_requests = 0
        self.ready = asyncio.Event()
        self.last_heartbeat = 0.0
        self._starts = 0
        self._command = command
        self._output = output
        self._popen: asyncio.subprocess.Process | None = None
        self._group: int | None = None
        self._socket_path = socket_path
        self._socket = _bind(socket_path)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._on_message)
        self._terminated = False
        self.variables = {**variables, "NOTIFY_SOCKET": str(self._socket_path), SUPERVISOR_PID: str(os.getpid())}
        """The environment of its next start, besides that of this process."""

    @property
    def pid(self) -> int | None:
        """The process id; None unless the process runs."""
        return self._popen.pid if self._popen is not None and self._popen.returncode is None else None

    @property
    def state(self) -> str:
        """Its state in a word: starting, ready, stopping, or stopped while it does not run."""
        if self.pid is None:
            return "stopped"
        if self._terminated:
            return "stopping"
        return "ready" if self.ready.is_set() else "starting"

    async def start(self, watchdog_s: float) -> None:
        """Start the process. From the time it is ready it must send a heartbeat every `watchdog_s`.

        Raises EngineDead if the operating system does not start it.
        """
        self.ready.clear()
        self.status = self.system_url = ""
        self.running_requests = 0
        self._terminated = False
        environment = {
            **os.environ,
            **self.variables,
            "WATCHDOG_USEC": str(int(watchdog_s * 1e6)),
            PROCESS_RESTARTS: str(self._starts),
        }
        self._starts += 1
        starting = asyncio.ensure_future(self._spawn(environment))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])  # the process may exist already: it must be tracked to be stopped
            raise
        except OSError as error:
            raise EngineDead(f"cannot start {self.name}: {error}") from error

    async def _spawn(self, environment: dict[str, str]) -> None:
        output = self._output.open()
        try:
            self._popen = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "baton",
                *self._command.split(),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # only the supervisor receives Ctrl-C; it stops its processes in order
            )
            self._group = self._popen.pid  # a process that leads a session leads a group of the same id
        finally:
            os.close(output)

    async def wait(self) -> int:
        """Wait for the exit and return the exit code. Processes that it has left, as of an engine, are killed.

        What they have written is in the log then. A control token that it has left is removed.
        """
        assert self._popen is not None
        code = await self._popen.wait()
        self._kill_group()
        self._group = None
        await asyncio.to_thread(self._output.join, LOG_TIMEOUT_S)
        self.remove_token()
        return code

    def terminate(self) -> None:
        """Ask the process to stop, once: the same signal again would end it without draining."""
        if not self._terminated:
            self._terminated = True
            self.send_signal(signal.SIGTERM)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal if the process runs. SIGKILL is sent to the processes that it has started too."""
        if self._popen is None or self._popen.returncode is not None:
            return
        if number == signal.SIGKILL:
            self._kill_group()
        else:
            self._popen.send_signal(number)

    def _kill_group(self) -> None:
        """Kill what there is of the process group, at most once after the process has exited: ids are used again."""
        if self._group is not None:
            with suppress(ProcessLookupError, PermissionError):  # nothing is left, or it belongs to another user
                os.killpg(self._group, signal.SIGKILL)

    def exit_reason(self) -> str:
        """Return the last status that the process sent, or else the last line of its log."""
        return self.status or self._output.last_line()

    def close(self) -> None:
        """Close and remove the socket, and close the log, after the exit."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket_path.unlink(missing_ok=True)
        self._output.close()
        self.remove_token()

    def remove_token(self) -> None:
        """Remove the control token, which a process that is killed leaves."""
        with suppress(ConfigError):  # no home directory
            remove_token(control_directory(), self.system_url)

    def _on_message(self) -> None:
        try:
            message = self._socket.recv(4096).decode(errors="replace")
        except BlockingIOError:
            return
        self.last_heartbeat = self._loop.time()
        for line in message.splitlines():
            key, _, value = line.partition("=")
            if key == "STATUS":
                self.status = value
            elif key == "READY" and value == "1":
                self.ready.set()
            elif key == SYSTEM_URL:
                self.system_url = value
            elif key == RUNNING_REQUESTS and value.isdigit():
                self.running_requests = int(value)


def _bind(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        sock.bind(str(path))
    except OSError as error:  # a path may have 107 bytes
        sock.close()
        raise ConfigError(f"cannot create the socket {path} ({error}); set TMPDIR to another, shorter path") from None
    return sock
