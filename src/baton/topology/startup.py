"""The start of `baton serve`: a progress line on the terminal, and the wait for a model on the HTTP endpoint."""

import asyncio
import json
import logging
import ssl
import sys
from collections.abc import Sequence

from baton.config.load import an_api_key
from baton.config.settings import Settings
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


async def wait_for_model(settings: Settings) -> str:
    """Wait until `/v1/models` lists a model and return the first name. The caller sets the timeout."""
    logged = ""
    while True:
        problem = "no model is registered"
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                names = await _list_models(settings)
            if names:
                return names[0]
        except (OSError, TimeoutError) as error:
            problem = repr(error)
        if problem != logged:
            log.debug("waiting for a model on %s port %d: %s", settings.host, settings.port, problem)
            logged = problem
        await asyncio.sleep(POLL_INTERVAL_S)


async def _list_models(settings: Settings) -> list[str]:
    """Return the names in `/v1/models`. Raises OSError if the endpoint cannot be reached or answers with an error."""
    head, _, body = (await _get_models(settings)).partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0]
    if b" 200 " not in status:
        raise ConnectionError(status.decode(errors="replace"))
    return [str(entry["id"]) for entry in json.loads(body)["data"]]


async def _get_models(settings: Settings) -> bytes:
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    reader, writer = await asyncio.open_connection(target, settings.port, ssl=_own_tls(settings))
    try:
        key = an_api_key(settings)
        authorization = f"Authorization: Bearer {key}\r\n" if key is not None else ""
        writer.write(f"GET /v1/models HTTP/1.0\r\nHost: localhost\r\n{authorization}\r\n".encode())
        return await reader.read()
    finally:
        writer.close()


def _own_tls(settings: Settings) -> ssl.SSLContext | None:
    """Return the context to reach our own endpoint, whose certificate is for the names that clients use."""
    if not settings.tls_certificate:
        return None
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
