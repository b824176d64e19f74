"""Child processes that do not outlive the thread that starts them, from their first instruction on.

A library's process may ask the kernel to be killed with its parent, but only after it has imported the library, which
takes seconds. If its parent is killed before that, it stays. So it is started by a program that asks first, and then
becomes the interpreter.
"""

import multiprocessing.spawn
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FORK_MARK = "--multiprocessing-fork"
_PROGRAM = f"""\
import ctypes, os, signal, sys
parent, *arguments = sys.argv[1:]
if arguments[-1] == {_FORK_MARK!r}:  # not Python's resource tracker, which has to clean up after the parent
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which survives exec
    if os.getppid() != int(parent):
        sys.exit(1)
os.execv(sys.executable, [sys.executable, *arguments])
"""


@contextmanager
def children_bound_to_this_thread(directory: Path) -> Iterator[None]:
    """Have `multiprocessing` start its processes so, on Linux. `directory` holds two files meanwhile."""
    if sys.platform != "linux":
        yield
        return
    program, starter = directory / "bound_child.py", directory / "bound_child.sh"
    program.write_text(_PROGRAM)
    command = shlex.join([sys.executable, "-SE", str(program), str(os.getpid())])
    starter.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    starter.chmod(0o700)
    before = multiprocessing.spawn.get_executable()
    multiprocessing.spawn.set_executable(str(starter))
    try:
        yield
    finally:
        multiprocessing.spawn.set_executable(before)
