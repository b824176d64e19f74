"""The frontend process: the OpenAI endpoint, until it is told to stop."""

import asyncio
import logging

from baton.config.settings import Settings
from baton.errors import BatonError, EngineDead
from baton.process.signals import stop_on_signals
from baton.runtimes.dynamo.frontend import DynamoFrontend
from baton.status.sd_notify import notify, send_heartbeats

log = logging.getLogger(__name__)


def run_frontend(settings: Settings) -> int:
    """Run the frontend until it is told to stop; return its exit code."""
    import uvloop

    return uvloop.run(_main(settings))


async def _main(settings: Settings) -> int:
    stop = stop_on_signals(drain_timeout_s=settings.drain_timeout_s)
    frontend = DynamoFrontend(
        settings.runtime,
        settings.namespace,
        settings.host,
        settings.port,
        settings.router,
        settings.busy_threshold,
        settings.migrations,
        settings.drain_timeout_s,
        backend_timeout_s=settings.request_timeout_s + settings.drain_timeout_s,
    )
    beating = asyncio.create_task(send_heartbeats(stop.set), name="heartbeat")
    try:
        await frontend.start()
        log.info("listening on http://%s:%d", settings.host, settings.port)
        notify("READY=1")
        await _until_stopped(frontend, stop)
    except BatonError as error:
        if error.code == "config":
            raise
        log.critical("%s", error.message)
        return 1
    finally:
        await frontend.stop()
        beating.cancel()
    return 0


async def _until_stopped(frontend: DynamoFrontend, stop: asyncio.Event) -> None:
    ended = asyncio.create_task(frontend.wait())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([ended, stopping], return_when=asyncio.FIRST_COMPLETED)
    for task in (ended, stopping):
        task.cancel()
    if not stop.is_set():
        raise EngineDead("the frontend has ended by itself")
