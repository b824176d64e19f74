"""The reference worker: the runtime's own pattern, an async generator that yields one dict per token.

It measures the runtime used as in its own examples, so it imports nothing of Baton's serving code.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import cycle, islice
from typing import Any

import uvloop
from dynamo import _core

from bench.peers.pace import new_wait

Chunks = AsyncIterator[dict[str, object]]
Handler = Callable[[Mapping[str, Any], object], Chunks]


def echo_handler(pace_s: float, catch_up: bool) -> Handler:
    async def generate(request: Mapping[str, Any], context: object) -> Chunks:
        wait = new_wait(pace_s, catch_up)
        for token in islice(cycle(request["token_ids"]), request["stop_conditions"]["max_tokens"]):
            await wait()
            yield {"token_ids": [token]}
        yield {"token_ids": [], "finish_reason": "length"}

    return generate


async def serve(model_dir: str, handler: Handler) -> None:
    runtime = _core.DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("reference.backend.generate")
    await _core.register_model(
        _core.ModelInput.Tokens,
        _core.ModelType.Chat | _core.ModelType.Completions,
        endpoint,
        model_dir,
        "echo",
        worker_type=_core.WorkerType.Aggregated,
        kv_cache_block_size=16,
        runtime_config=_core.ModelRuntimeConfig(),
    )
    await endpoint.serve_endpoint(handler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--pace-ms", type=float, default=0.0)
    parser.add_argument("--catch-up", action="store_true")
    options = parser.parse_args()
    uvloop.run(serve(options.model_dir, echo_handler(options.pace_ms / 1000, options.catch_up)))


if __name__ == "__main__":
    main()
