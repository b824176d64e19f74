"""The start of `baton serve`: a progress line on the terminal, and the wait for a model on the HTTP endpoint."""

import asyncio
import json
import logging
import sys
from collections.abc import Sequence

from baton.status.progress_line import rewrite_line
from baton.topology.process import Process

log = logging.getLogger(__name__)

REDRAW_INTERVAL_S = 0.2
POLL_INTERVAL_S = 0.05
POLL_TIMEOUT_S = 2.0


async def show_progress(processes: Sequence[Process]) -> None:
    """Show the status of processes that are not ready, until cancelled. Does nothing without a terminal."""
    if not sys.stderr.isatty():
        return
    try:
        while True:
            starting = [f"{each.name}: {each.status}" for each in processes if each.status and not each.ready.is_set()]
            rewrite_line("   ".join(starting))
            await asyncio.sleep(REDRAW_INTERVAL_S)
    finally:
        rewrite_line("")


async def wait_for_model(host: str, port: int) -> str:
    """Wait until `/v1/models` lists a model and return the first name. The caller sets the timeout."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    logged = ""
    while True:
        problem = "no model is registered"
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                names = await _list_models(target, port)
            if names:
                return names[0]
        except (OSError, TimeoutError) as error:
            problem = repr(error)
        if problem != logged:
            log.debug("waiting for a model on %s port %d: %s", target, port, problem)
            logged = problem
        await asyncio.sleep(POLL_INTERVAL_S)


async def _list_models(host: str, port: int) -> list[str]:
    """Return the names in `/v1/models`. Raises OSError if the endpoint cannot be reached or answers with an error."""
    head, _, body = (await _get_models(host, port)).partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0]
    if b" 200 " not in status:
        raise ConnectionError(status.decode(errors="replace"))
    return [str(entry["id"]) for entry in json.loads(body)["data"]]


async def _get_models(host: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"GET /v1/models HTTP/1.0\r\nHost: localhost\r\n\r\n")
        return await reader.read()
    finally:
        writer.close()
