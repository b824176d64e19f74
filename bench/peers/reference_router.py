"""The reference's way of routing to pools: a generator that takes only the request and yields what a pool yields.

Written anew from what is known of its behaviour: it chooses by the cells of a grid, asks the pool's client for a
stream, takes the data out of what comes, and lets the runtime pull item by item. It knows no context, so it hears
neither that a client has left nor which trace a request belongs to, and it tries nothing twice.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import uvloop
from dynamo import _core

Chunks = AsyncIterator[Any]


class ReferenceRouter:
    """Routes by the length of the prompt alone: one bucket for each of `mapping`, up to `longest`."""

    def __init__(self, clients: Sequence[Any], longest: int, mapping: Sequence[int]) -> None:
        self._clients = clients
        self._longest = longest
        self._mapping = mapping

    async def generate(self, request: Mapping[str, Any]) -> Chunks:
        """Yield what the chosen pool answers."""
        client = self._clients[self._choose(request)]
        stream = await client.generate(request)
        async for item in stream:
            yield item.data() if hasattr(item, "data") else item

    def _choose(self, request: Mapping[str, Any]) -> int:
        step = self._longest / len(self._mapping)
        bucket = int(len(request.get("token_ids", [])) / step)
        return self._mapping[max(0, min(bucket, len(self._mapping) - 1))]


async def serve(path: str, pools: Sequence[str], longest: int) -> None:
    """Serve at `path`, with a bucket for each pool, in order."""
    runtime = _core.DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    clients = [await runtime.endpoint(pool).client() for pool in pools]
    router = ReferenceRouter(clients, longest, range(len(pools)))
    await runtime.endpoint(path).serve_endpoint(router.generate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", required=True, help="the endpoint, as namespace.component.endpoint")
    parser.add_argument("--pool", action="append", required=True, help="the endpoint of a pool; repeat for each")
    parser.add_argument("--longest", type=int, required=True, help="where the last bucket ends, in tokens")
    options = parser.parse_args()
    uvloop.run(serve(options.path, options.pool, options.longest))


if __name__ == "__main__":
    main()
