"""The Rust frontend without the edge, with the settings that `baton frontend` gives it.

Settings come from the environment (`BATON_*`), as for any frontend.
"""

import argparse
import asyncio
import os

import uvloop

from baton.config.load import load
from baton.config.settings import Settings
from baton.runtimes.dynamo.environment import environment
from bench.chat import HOST

# As `runtimes/dynamo/frontend.py` sets them.
VARIABLES = {"DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS": "200", "DYN_LORA_ENABLED": "false"}


async def serve(settings: Settings, port: int) -> None:
    from dynamo import _core

    from baton.process.service_process import unless_stopped
    from baton.process.signals import stop_on_signals
    from baton.runtimes.dynamo.listener import set_nodelay
    from baton.runtimes.dynamo.routing import router_config
    from baton.runtimes.dynamo.runtime import DynamoRuntime

    stop = stop_on_signals(drain_timeout_s=settings.drain_timeout_s)
    runtime = DynamoRuntime(settings.runtime, subscribes=True)
    await runtime.start()
    arguments = _core.EntrypointArgs(
        _core.EngineType.Dynamic,
        http_host=HOST,
        http_port=port,
        router_config=router_config(settings),
        migration_limit=settings.migrations,
        namespace=settings.namespace,
    )
    engine = await _core.make_engine(runtime.raw, arguments)
    served = asyncio.ensure_future(_core.run_input(runtime.raw, "http", engine))
    while not set_nodelay(port):
        if served.done():
            return
        await asyncio.sleep(0.01)
    await unless_stopped(stop, until_done(served))
    await runtime.shutdown()


async def until_done(served: "asyncio.Future[None]") -> None:
    await asyncio.wait([served])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    settings = load({}, os.environ, None)
    os.environ.update(environment(settings.runtime) | VARIABLES)  # the runtime reads it on import
    uvloop.run(serve(settings, options.port))


if __name__ == "__main__":
    main()
