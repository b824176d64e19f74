"""The reference worker: the runtime's own pattern, an async generator that yields one dict per token.

With `--push` it sends the dicts instead, from the event loop, which is the least that a token can cost a worker in
Python; a client that stops reading then blocks all of them. `--steps` paces all requests by one clock. It measures the
runtime used as in its own examples, so it imports nothing of Baton's serving code.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import cycle, islice
from typing import Any

import uvloop
from dynamo import _core

from bench.peers.pace import Steps, Wait, sleeping

Chunks = AsyncIterator[dict[str, object]]
Handler = Callable[..., Any]


def pulled(new_wait: Callable[[], Wait]) -> Handler:
    async def generate(request: Mapping[str, Any], context: object) -> Chunks:
        wait = new_wait()
        for token in islice(cycle(request["token_ids"]), request["stop_conditions"]["max_tokens"]):
            await wait()
            yield {"token_ids": [token]}
        yield {"token_ids": [], "finish_reason": "length"}

    return generate


def pushed(new_wait: Callable[[], Wait]) -> Handler:
    generate = pulled(new_wait)

    async def push(request: Mapping[str, Any], context: object, response_sender: Any = None) -> Chunks:
        async for chunk in generate(request, context):
            response_sender.send(chunk)
        response_sender.close()
        for chunk in ():
            yield chunk

    return push


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
    parser.add_argument("--push", action="store_true")
    parser.add_argument("--steps", action="store_true")
    options = parser.parse_args()
    pace_s = options.pace_ms / 1000
    steps = Steps(pace_s)
    new_wait: Callable[[], Wait] = (lambda: steps.wait) if options.steps and pace_s else (lambda: sleeping(pace_s))
    uvloop.run(serve(options.model_dir, (pushed if options.push else pulled)(new_wait)))


if __name__ == "__main__":
    main()
