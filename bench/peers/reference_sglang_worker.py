"""The reference's pattern of serving SGLang: one task per request waits for its cancellation, one dict per chunk.

Written independently from its observed behaviour: the monitor reads the engine's request id from the first chunk, every
chunk becomes a dict of plain values, and the runtime pulls them one by one.
"""

import argparse
import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import uvloop

from bench.peers.fake_sglang import Chunk, Engine
from bench.peers.reference_worker import Chunks, Handler, serve

OPTIONS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p")


class ReferenceHandler:
    """Serves one engine."""

    def __init__(self, engine: Engine, shutdown: asyncio.Event) -> None:
        self._engine = engine
        self._shutdown = shutdown

    async def generate(self, request: Mapping[str, Any], context: Any) -> Chunks:
        stream = await self._engine.async_generate(
            input_ids=request["token_ids"],
            sampling_params=sampling_params(request),
            stream=True,
            rid=uuid.uuid4().hex,
            external_trace_header=None,
            data_parallel_rank=(request.get("routing") or {}).get("dp_rank"),
        )
        async for chunk in self._tokens(stream, context):
            yield chunk

    async def _tokens(self, stream: AsyncGenerator[Chunk, None], context: Any) -> Chunks:
        first: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        async with self._watching(first, context):
            async for chunk in stream:
                meta = chunk["meta_info"]
                if not first.done():
                    first.set_result(meta["id"])
                out: dict[str, object] = {"index": chunk.get("index") or 0}
                tokens, finish = chunk.get("output_ids") or [], meta["finish_reason"]
                if finish:
                    kind = finish["type"]
                    out["finish_reason"] = "cancelled" if kind.startswith("abort") else kind
                    out["completion_usage"] = usage(meta)
                if not tokens and not finish:
                    continue
                out["token_ids"] = tokens
                if not context.is_stopped():
                    yield out

    @asynccontextmanager
    async def _watching(self, first: "asyncio.Future[str]", context: Any) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._abort_when_stopped(first, context))
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.wait([watch])

    async def _abort_when_stopped(self, first: "asyncio.Future[str]", context: Any) -> None:
        rid = await first
        stopped = asyncio.ensure_future(context.async_killed_or_stopped())
        shutdown = asyncio.create_task(self._shutdown.wait())
        try:
            await asyncio.wait([stopped, shutdown], return_when=asyncio.FIRST_COMPLETED)
            self._engine.tokenizer_manager.abort_request(rid=rid, abort_all=False)
        finally:
            for waiting in (stopped, shutdown):
                waiting.cancel()


def sampling_params(request: Mapping[str, Any]) -> dict[str, object]:
    sampling, stop = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    params = {name: sampling.get(name) for name in OPTIONS}
    params |= {"n": sampling.get("n"), "ignore_eos": stop.get("ignore_eos"), "sampling_seed": sampling.get("seed")}
    chosen = {name: value for name, value in params.items() if value is not None}
    return {**chosen, "max_new_tokens": stop.get("max_tokens")}


def usage(meta: Mapping[str, Any]) -> dict[str, object]:
    prompt, completion = meta["prompt_tokens"], meta["completion_tokens"]
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


async def run(model_dir: str, pace_s: float) -> None:
    handler: Handler = ReferenceHandler(Engine(pace_s), asyncio.Event()).generate
    await serve(model_dir, handler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--pace-ms", type=float, default=0.0)
    options = parser.parse_args()
    uvloop.run(run(options.model_dir, options.pace_ms / 1000))


if __name__ == "__main__":
    main()
