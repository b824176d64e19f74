"""What the processes of a start are doing, in one line of the terminal that waits for them."""

import asyncio
import sys
from collections.abc import Sequence

from baton.status.progress_line import rewrite_line
from baton.topology.process import Process

REDRAW_S = 0.2


async def show_progress(processes: Sequence[Process]) -> None:
    """Show it until cancelled, and then take it away."""
    if not sys.stderr.isatty():
        return
    try:
        while True:
            busy = [f"{one.name}: {one.status}" for one in processes if one.status and not one.ready.is_set()]
            rewrite_line("   ".join(busy))
            await asyncio.sleep(REDRAW_S)
    finally:
        rewrite_line("")
