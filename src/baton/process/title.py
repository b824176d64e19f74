"""Names this process for `ps` and `top`: what it is, its name and its model."""

import ctypes
from contextlib import suppress
from pathlib import Path

PR_SET_NAME = 15
MAX_NAME_BYTES = 15
_STATE, _ARG_START, _ARG_END = 3, 48, 49
"""Fields of /proc/self/stat, counted from 1; the last two say where the command line lies in memory."""


def set_process_title(command: str, name: str, *details: str) -> None:
    """Make `ps` show `baton COMMAND NAME DETAILS`, and where there is less room `baton:NAME`. Never raises.

    Without it `ps` shows the interpreter and `-m baton`. The title is cut to the length of the command line, whose
    memory it takes. Costs some microseconds, once.
    """
    title = " ".join(filter(None, ("baton", command, "" if name == command else name, *details)))
    with suppress(OSError, ValueError, IndexError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_NAME, f"baton:{name}".encode()[:MAX_NAME_BYTES], 0, 0, 0)
        start, end = _command_line()
        size = end - start
        # A last byte that is not 0 tells the kernel that this is a title, which ends at its first 0.
        ctypes.memmove(start, title.encode()[: size - 2].ljust(size - 1, b"\0") + b" ", size)


def _command_line() -> tuple[int, int]:
    """Return the first and last address of the command line. Raises ValueError where the kernel hides them."""
    # The name of the program is in parentheses and may have blanks.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START - _STATE]), int(fields[_ARG_END - _STATE])
    if not 0 < start < end:
        raise ValueError("unknown")
    return start, end
