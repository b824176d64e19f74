"""The reference's pattern of routing to pools: a generator that takes only the request and yields the pool's chunks.

Written independently from its observed behaviour: it selects a pool by the cells of a grid, opens a stream with the
pool's client, unwraps the data of each item, and lets the runtime pull item by item. It takes no context, so it neither
detects a client disconnect nor propagates the trace, and it does not retry.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import uvloop
from dynamo import _core

Chunks = AsyncIterator[Any]


class ReferenceRouter:
    """Routes by prompt length alone: one bucket for each item of `mapping`, up to `max_prompt_tokens`."""

    def __init__(self, clients: Sequence[Any], max_prompt_tokens: int, mapping: Sequence[int]) -> None:
        self._clients = clients
        self._max_prompt_tokens = max_prompt_tokens
        self._mapping = mapping

    async def generate(self, request: Mapping[str, Any]) -> Chunks:
        """Yield the chunks of the selected pool."""
        client = self._clients[self._select(request)]
        stream = await client.generate(request)
        async for item in stream:
            yield item.data() if hasattr(item, "data") else item

    def _select(self, request: Mapping[str, Any]) -> int:
        step = self._max_prompt_tokens / len(self._mapping)
        bucket = int(len(request.get("token_ids", [])) / step)
        return self._mapping[max(0, min(bucket, len(self._mapping) - 1))]


async def serve(path: str, pools: Sequence[str], max_prompt_tokens: int) -> None:
    """Serve at `path`, with a bucket for each pool, in order."""
    runtime = _core.DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    clients = [await runtime.endpoint(pool).client() for pool in pools]
    router = ReferenceRouter(clients, max_prompt_tokens, range(len(pools)))
    await runtime.endpoint(path).serve_endpoint(router.generate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", required=True, help="the endpoint, as namespace.component.endpoint")
    parser.add_argument("--pool", action="append", required=True, help="the endpoint of a pool; repeat for each")
    parser.add_argument("--max-prompt-tokens", type=int, required=True, help="upper end of the last bucket")
    options = parser.parse_args()
    uvloop.run(serve(options.path, options.pool, options.max_prompt_tokens))


if __name__ == "__main__":
    main()
