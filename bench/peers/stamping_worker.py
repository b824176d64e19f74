"""A worker that puts the time into every chunk, so that the client can compute its age.

All processes of a machine share its monotonic clock. A request sets the number of tokens and the pace; a pace of 0 is
unpaced.
"""

import argparse
import asyncio
import os
import time
from collections.abc import AsyncGenerator

import msgspec
import uvloop

from baton.config.runtime import RuntimeOptions
from baton.ports.runtime import Context, Service, Wire
from baton.runtimes.dynamo.environment import environment
from bench.peers.pace import by_clock

STOP_S = 1.0


def stamped_request(tokens: int, pace_ms: float, prompt: int = 3) -> Wire:
    """Return a request for this worker: a frontend's request plus the pace."""
    return {
        "token_ids": list(range(prompt)),
        "stop_conditions": {"max_tokens": tokens},
        "sampling_options": {"temperature": 0.0},
        "pace_ms": pace_ms,
    }


class _Stop(msgspec.Struct):
    max_tokens: int


class _Request(msgspec.Struct):
    stop_conditions: _Stop
    pace_ms: float


async def generate(request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
    """Yield numbered tokens, each with the time at which it was sent."""
    fields = msgspec.convert(request, _Request)
    wait = by_clock(fields.pace_ms / 1000)
    cancelled = asyncio.Event()
    context.on_cancel(cancelled.set)
    for number in range(fields.stop_conditions.max_tokens):
        if number:
            await wait()
        if cancelled.is_set():
            return
        yield {"token_ids": [number], "index": 0, "t": time.monotonic_ns()}


def as_is(wire: object) -> Wire:
    """Return `wire`, which needs no codec."""
    assert isinstance(wire, dict)
    return wire


async def run(directory: str, path: str) -> None:
    """Serve at `path` until a stop signal."""
    from baton.process.signals import stop_on_signals
    from baton.runtimes.dynamo.runtime import DynamoRuntime

    stop = stop_on_signals(drain_timeout_s=STOP_S)
    runtime = DynamoRuntime(RuntimeOptions(directory=directory))
    await runtime.start()
    try:
        await runtime.serve(path, Service(generate, as_is, as_is))
        await stop.wait()
    finally:
        await runtime.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", required=True, help="directory of file discovery")
    parser.add_argument("--path", required=True, help="the endpoint, as namespace.component.endpoint")
    options = parser.parse_args()
    os.environ.update(environment(RuntimeOptions(directory=options.directory)))  # the runtime reads it on import
    uvloop.run(run(options.directory, options.path))


if __name__ == "__main__":
    main()
