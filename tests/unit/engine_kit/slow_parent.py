"""Starts a process and waits. That process imports this file first, which takes a long time."""

import multiprocessing
import os
import sys
import time
from pathlib import Path

from baton.engine_kit.bound_children import children_bound_to_this_thread

if __name__ == "__mp_main__":  # in the process
    Path(os.environ["STARTED"]).write_text(str(os.getpid()))
    time.sleep(60)


def run() -> None:
    """Not reached by the test."""


if __name__ == "__main__":
    with children_bound_to_this_thread(Path(sys.argv[1])):
        multiprocessing.get_context("spawn").Process(target=run).start()
        time.sleep(60)
