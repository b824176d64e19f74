"""The embed role: one vector for each text or list of tokens."""

import asyncio
import base64
import math
import sys
import time
from array import array
from collections.abc import AsyncGenerator, Sequence

from baton.errors import ContextTooLong, EngineFailed, InvalidRequest
from baton.ports.engine import EmbedEngine, EmbedWork, EngineInfo
from baton.ports.runtime import Context
from baton.ports.tokenizer import TextEncoder
from baton.protocol.embeddings import Embeddings, EmbedRequest, Texts, TokenLists
from baton.protocol.lifecycle import State
from baton.request.tracker import RequestTracker, TrackedRequest

TEXTS_AT_ONCE = 64


class EmbedHandler:
    """Embeds on one engine."""

    def __init__(self, engine: EmbedEngine, info: EngineInfo, tracker: RequestTracker, encoder: TextEncoder) -> None:
        self._engine = engine
        self._info = info
        self._tracker = tracker
        self._encoder = encoder

    async def embed(self, request: EmbedRequest, context: Context) -> AsyncGenerator[Embeddings, None]:
        """Yield all vectors at once. Raises the errors of `errors.py`; closing the iterator takes the work back."""
        with self._tracker.track(context, 0) as tracked:
            self._check_dimensions(request.dimensions)
            inputs = await self._tokens(request.source, tracked)
            tracked.prompt_tokens = sum(len(tokens) for tokens in inputs)
            work = EmbedWork(request_id=tracked.request_id, inputs=inputs, trace_headers=context.trace_headers)
            vectors = await tracked.scope.wait(self._engine.embed(work))
            if len(vectors) != len(inputs):
                raise EngineFailed(f"the engine made {len(vectors)} vectors of {len(inputs)} inputs")
            tracked.lifecycle.advance(State.SUBMITTED)
            tracked.first_output_at = time.perf_counter()
            written = await tracked.scope.wait(asyncio.to_thread(_write, vectors, request.dimensions))
            yield Embeddings(model=request.model, vectors=written, prompt_tokens=tracked.prompt_tokens)

    def _check_dimensions(self, dimensions: int | None) -> None:
        size = self._info.embedding_size
        if dimensions is not None and size is not None and not 1 <= dimensions <= size:
            raise InvalidRequest(
                f"dimensions: {dimensions} is not within 1 and {size}, the size of this model's vectors"
            )

    async def _tokens(self, source: Texts | TokenLists, tracked: TrackedRequest) -> tuple[tuple[int, ...], ...]:
        """Return the inputs as tokens, none of them too long. A few texts at a time, so that a client can leave."""
        if isinstance(source, TokenLists):
            self._check_lengths(source.items, 0)
            return source.items
        inputs: list[tuple[int, ...]] = []
        for first in range(0, len(source.items), TEXTS_AT_ONCE):
            texts = source.items[first : first + TEXTS_AT_ONCE]
            encoded = await tracked.scope.wait(asyncio.to_thread(self._encoder.encode_batch, texts))
            self._check_lengths(encoded, first)
            inputs += [tuple(tokens) for tokens in encoded]
        return tuple(inputs)

    def _check_lengths(self, inputs: Sequence[Sequence[int]], first: int) -> None:
        for place, tokens in enumerate(inputs, first):
            if len(tokens) > self._info.context_length:
                raise ContextTooLong(
                    f"input[{place}]: {len(tokens)} tokens; this model embeds at most {self._info.context_length}"
                )


def _write(vectors: "Sequence[array[float]]", dimensions: int | None) -> tuple[str, ...]:
    return tuple(_base64(vector if dimensions is None else _shorten(vector, dimensions)) for vector in vectors)


def _shorten(vector: "array[float]", dimensions: int) -> "array[float]":
    """Return the first `dimensions` numbers, stretched to length 1."""
    kept = vector[:dimensions]
    length = math.hypot(*kept)
    return array("f", [number / length for number in kept]) if length else kept


def _base64(vector: "array[float]") -> str:
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return base64.b64encode(vector).decode("ascii")
