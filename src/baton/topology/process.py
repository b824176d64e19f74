"""One supervised process: how it is started, what it tells us, how it is stopped."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

LOG_TAIL_BYTES = 4000


class Process:
    """A `baton` subprocess with its notification socket (see `notify.py`)."""

    def __init__(self, name: str, command: str, variables: dict[str, str], run_dir: Path, log: Path | None) -> None:
        self.name = name
        self.status = ""
        self.ready = asyncio.Event()
        self.last_beat = 0.0
        self._command = command
        self._log = log
        self._popen: asyncio.subprocess.Process | None = None
        self._socket_path = run_dir / f"{name}.sock"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(self._socket_path))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._on_message)
        self._variables = {**variables, "NOTIFY_SOCKET": str(self._socket_path)}

    @property
    def pid(self) -> int | None:
        """Its process id, while it runs."""
        return self._popen.pid if self._popen is not None and self._popen.returncode is None else None

    async def start(self, watchdog_s: float) -> None:
        """Start it. It is expected to show a sign of life every `watchdog_s` from the time it is ready."""
        self.ready.clear()
        self.status = ""
        environment = {**os.environ, **self._variables, "WATCHDOG_USEC": str(int(watchdog_s * 1e6))}
        starting = asyncio.ensure_future(self._spawn(environment))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])  # there may be a process by now: it must be known, so that it can be ended
            raise

    async def _spawn(self, environment: dict[str, str]) -> None:
        output = self._log.open("ab") if self._log is not None else None
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
                start_new_session=True,  # Ctrl-C is for the supervisor; it stops its processes in order
            )
        finally:
            if output is not None:
                output.close()

    async def wait(self) -> int:
        """Wait until it has ended; return its exit code."""
        assert self._popen is not None
        return await self._popen.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self._popen is not None and self._popen.returncode is None:
            self._popen.send_signal(number)

    def last_words(self) -> str:
        """Return what is known of why it ended: its own status, or the end of its log."""
        if self.status:
            return self.status
        if self._log is not None and self._log.exists():
            lines = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip().splitlines()
            return lines[-1] if lines else ""
        return ""

    def close(self) -> None:
        """Free the socket."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket_path.unlink(missing_ok=True)

    def _on_message(self) -> None:
        try:
            message = self._socket.recv(4096).decode(errors="replace")
        except BlockingIOError:
            return
        self.last_beat = self._loop.time()
        for line in message.splitlines():
            key, _, value = line.partition("=")
            if key == "STATUS":
                self.status = value
            elif key == "READY" and value == "1":
                self.ready.set()
