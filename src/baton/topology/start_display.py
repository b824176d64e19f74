"""The start of `baton serve` on the terminal: a line for each process that is ready, and the progress of the others."""

import asyncio
from collections.abc import Sequence

from baton.status.progress_line import rewrite_line
from baton.topology.process import Process
from baton.topology.terminal import Terminal

REDRAW_INTERVAL_S = 0.1


async def show_start(processes: Sequence[Process], terminal: Terminal) -> None:
    """Show the start until all processes are ready, or until cancelled. The progress line needs a terminal."""
    clock = asyncio.get_running_loop().time
    began = clock()
    waiting = list(processes)
    try:
        while waiting:
            for process in [each for each in waiting if each.ready.is_set()]:
                rewrite_line("")
                terminal.ready(process.name, clock() - began, process.system_url)
                waiting.remove(process)
            rewrite_line("   ".join(f"{each.name}: {each.status or 'starting'}" for each in waiting))
            await asyncio.sleep(REDRAW_INTERVAL_S)
    finally:
        rewrite_line("")
