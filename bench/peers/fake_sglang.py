"""A double of SGLang's engine: `Engine.async_generate` and the tokenizer manager behind it.

A step generates one token for every request of the batch and wakes its reader; chunks that a late reader has not read
are joined into one. The fields of a chunk and the wake-ups match SGLang 0.5.23 with incremental streaming. The
scheduler costs nothing here: in SGLang it is another process.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

Chunk = dict[str, Any]


class Request:
    """The fields of SGLang's GenerateReqInput that the double reads."""

    def __init__(self, *, rid: str, input_ids: list[int], sampling_params: Mapping[str, Any], **_: object) -> None:
        self.rid = rid
        self.input_ids = input_ids
        self.max_new_tokens: int = sampling_params["max_new_tokens"]


class State:
    """One request in flight."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.chunks: list[Chunk] = []
        self.event = asyncio.Event()
        self.generated = 0
        self.dispatched = True


class Manager:
    """The request part of the tokenizer manager. Lives on one event loop."""

    def __init__(self, pace_s: float) -> None:
        self.rid_to_state: dict[str, State] = {}
        self._generating: dict[str, State] = {}
        self._pace_s = pace_s
        self._work = asyncio.Event()
        self._stepping = asyncio.create_task(self._run())

    async def generate_request(self, request: Request, http: None = None) -> AsyncGenerator[Chunk, None]:
        """Yield new tokens whenever there are some."""
        state = self.rid_to_state[request.rid] = self._generating[request.rid] = State(request)
        self._work.set()
        try:
            while True:
                await state.event.wait()
                chunks, state.chunks = state.chunks, []
                state.event.clear()
                chunk = chunks[-1] if len(chunks) == 1 else _joined(chunks)
                yield chunk
                if chunk["meta_info"]["finish_reason"] is not None:
                    return
        finally:
            self.rid_to_state.pop(request.rid, None)
            self._generating.pop(request.rid, None)

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """End a request with finish reason `abort`."""
        if (state := self.rid_to_state.get(rid)) is not None:
            self._generating.pop(rid, None)
            self._emit(state, [], {"type": "abort", "message": "Abort"})

    async def close(self) -> None:
        """Stop generating."""
        self._stepping.cancel()
        with suppress(asyncio.CancelledError):
            await self._stepping

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            if not self._generating:
                self._work.clear()
                await self._work.wait()
                due = clock()
            due += self._pace_s
            await asyncio.sleep(max(0.0, due - clock()))
            for state in tuple(self._generating.values()):
                self._step(state)

    def _step(self, state: State) -> None:
        prompt, limit = state.request.input_ids, state.request.max_new_tokens
        token = prompt[state.generated % len(prompt)]
        state.generated += 1
        if state.generated < limit:
            self._emit(state, [token], None)
        else:
            del self._generating[state.request.rid]
            self._emit(state, [token], {"type": "length", "length": limit})

    def _emit(self, state: State, tokens: list[int], finish: Chunk | None) -> None:
        meta = {
            "id": state.request.rid,
            "finish_reason": finish,
            "prompt_tokens": len(state.request.input_ids),
            "weight_version": "default",
            "num_retractions": 0,
            "completion_tokens": state.generated,
            "cached_tokens": 0,
        }
        state.chunks.append({"text": "", "output_ids": tokens, "meta_info": meta})
        state.event.set()


class Engine:
    """The part of `sgl.Engine` that handlers call."""

    def __init__(self, pace_s: float) -> None:
        self.tokenizer_manager = Manager(pace_s)

    async def async_generate(self, **fields: Any) -> AsyncGenerator[Chunk, None]:
        """Return the stream of a request, which starts when it is first read."""
        return self.tokenizer_manager.generate_request(Request(**fields))


def _joined(chunks: list[Chunk]) -> Chunk:
    return {**chunks[-1], "output_ids": [token for chunk in chunks for token in chunk["output_ids"]]}
