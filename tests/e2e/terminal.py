"""A command in a terminal of its own, used as a person would: keys in, and what the screen got out."""

import os
import pty
import re
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.harness import environment, eventually

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """Runs a command until it ends or `close` is called."""

    def __init__(self, command: Sequence[str], settings: dict[str, str] | None = None, cwd: Path | None = None) -> None:
        self._keyboard, child = pty.openpty()
        self._output = bytearray()
        self._answered = 0
        # The slave side has to be the controlling terminal, so that Ctrl-C becomes a signal.
        self.popen = subprocess.Popen(
            command,
            stdin=child,
            stdout=child,
            stderr=child,
            env={**environment(settings), "TERM": "xterm", "COLUMNS": "200", "LINES": "40"},
            cwd=cwd,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(child)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._keyboard, 4096)
            except OSError:  # the command has ended
                return
            self._output += data

    @property
    def raw(self) -> str:
        """Everything that the screen got."""
        return self._output.decode(errors="replace")

    @property
    def text(self) -> str:
        """What the screen got, without control sequences."""
        return _CONTROL.sub("", self.raw).replace("\r", "")

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._keyboard, keys.encode())

    def enter(self, line: str) -> None:
        """Type a line."""
        self.type(line + "\n")

    def answer(self, prompt: str, line: str, within_s: float = 60.0) -> None:
        """Type a line when the screen shows `prompt` last, after what the line before has caused."""
        eventually(
            lambda: len(self.text) > self._answered and self.text.endswith(prompt),
            within_s,
            f"{prompt!r} at the end of {self.text[-600:]!r}",
        )
        self._answered = len(self.text) + len(line) + 1
        self.enter(line)

    def wait_for(self, text: str, count: int = 1, within_s: float = 60.0) -> None:
        """Wait until the screen has got `text` that many times."""
        eventually(lambda: self.text.count(text) >= count, within_s, f"{text!r} {count} times in {self.text[-600:]!r}")

    def wait(self, within_s: float = 60.0) -> int:
        """Wait until the command has ended; return its exit code."""
        code = self.popen.wait(within_s)
        self._reader.join(5)
        return code

    def close(self) -> None:
        """End the command, whatever it does."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(10)
        self._reader.join(5)
        os.close(self._keyboard)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests run in the background of a script
