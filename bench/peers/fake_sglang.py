"""SGLang as a handler sees it, without SGLang: `Engine.async_generate` and the tokenizer manager behind it.

A step makes one token for every request, as a batch does, and wakes its reader; a reader that is late finds its chunks
joined into one. What is in a chunk, and how often a reader is woken, is SGLang's 0.5.23 with incremental streaming. The
scheduler costs nothing here: in SGLang it is another process.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

Chunk = dict[str, Any]


class Request:
    """The fields of SGLang's GenerateReqInput that a request to generate has here."""

    def __init__(self, *, rid: str, input_ids: list[int], sampling_params: Mapping[str, Any], **_: object) -> None:
        self.rid = rid
        self.input_ids = input_ids
        self.max_new_tokens: int = sampling_params["max_new_tokens"]


class State:
    """One request inside."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.chunks: list[Chunk] = []
        self.event = asyncio.Event()
        self.made = 0
        self.dispatched = True


class Manager:
    """The tokenizer manager's side of requests. Lives on one event loop."""

    def __init__(self, pace_s: float) -> None:
        self.rid_to_state: dict[str, State] = {}
        self._pace_s = pace_s
        self._work = asyncio.Event()
        self._stepping = asyncio.create_task(self._run())

    async def generate_request(self, request: Request, http: None = None) -> AsyncGenerator[Chunk, None]:
        """Yield what is new, each time there is something."""
        state = self.rid_to_state[request.rid] = State(request)
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

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """End a request with an abort as its reason."""
        if (state := self.rid_to_state.get(rid)) is not None:
            self._tell(state, [], {"type": "abort", "message": "Abort"})

    async def close(self) -> None:
        """Make nothing more."""
        self._stepping.cancel()
        with suppress(asyncio.CancelledError):
            await self._stepping

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            if not self.rid_to_state:
                self._work.clear()
                await self._work.wait()
                due = clock()
            due += self._pace_s
            await asyncio.sleep(max(0.0, due - clock()))
            for state in tuple(self.rid_to_state.values()):
                self._step(state)

    def _step(self, state: State) -> None:
        prompt, limit = state.request.input_ids, state.request.max_new_tokens
        if state.made < limit:
            token = prompt[state.made % len(prompt)]
            state.made += 1
            self._tell(state, [token], {"type": "length", "length": limit} if state.made == limit else None)

    def _tell(self, state: State, tokens: list[int], finish: Chunk | None) -> None:
        meta = {
            "id": state.request.rid,
            "finish_reason": finish,
            "prompt_tokens": len(state.request.input_ids),
            "weight_version": "default",
            "num_retractions": 0,
            "completion_tokens": state.made,
            "cached_tokens": 0,
        }
        state.chunks.append({"text": "", "output_ids": tokens, "meta_info": meta})
        state.event.set()


class Engine:
    """`sgl.Engine`, as far as a handler calls it."""

    def __init__(self, pace_s: float) -> None:
        self.tokenizer_manager = Manager(pace_s)

    async def async_generate(self, **fields: Any) -> AsyncGenerator[Chunk, None]:
        """Return the stream of a request; nothing begins before it is read."""
        return self.tokenizer_manager.generate_request(Request(**fields))


def _joined(chunks: list[Chunk]) -> Chunk:
    return {**chunks[-1], "output_ids": [token for chunk in chunks for token in chunk["output_ids"]]}
