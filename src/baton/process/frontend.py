"""The frontend process: the OpenAI endpoint, until it is stopped."""

import asyncio
import logging

from baton.config.settings import Settings
from baton.errors import BatonError, EngineDead
from baton.process.service_process import unless_stopped
from baton.process.signals import stop_on_signals
from baton.runtimes.dynamo.frontend import DynamoFrontend
from baton.runtimes.dynamo.routing import router_config, selects_by_adapter
from baton.status.sd_notify import notify, send_heartbeats

log = logging.getLogger(__name__)


def run_frontend(settings: Settings) -> int:
    """Run the frontend until it is stopped; return its exit code."""
    import uvloop

    return uvloop.run(_main(settings))


async def _main(settings: Settings) -> int:
    stop = stop_on_signals(drain_timeout_s=settings.drain_timeout_s)
    frontend = DynamoFrontend(
        settings.runtime,
        settings.namespace,
        settings.host,
        settings.port,
        router_config(settings),
        selects_by_adapter(settings),
        settings.migrations,
        settings.drain_timeout_s,
        backend_timeout_s=settings.request_timeout_s + settings.drain_timeout_s,
    )
    heartbeat = asyncio.create_task(send_heartbeats(stop.set), name="heartbeat")
    try:
        await frontend.start()
        log.info("listening on http://%s:%d", settings.host, settings.port)
        notify("READY=1")
        if await unless_stopped(stop, frontend.wait()) and not stop.is_set():
            raise EngineDead("the frontend has ended by itself")
    except BatonError as error:
        if error.code == "config":
            raise
        log.critical("%s", error.message)
        return 1
    finally:
        await frontend.stop()
        heartbeat.cancel()
    return 0
