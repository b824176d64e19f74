"""The embed role: one vector for each text or list of tokens."""

import asyncio
import base64
import math
import sys
from array import array
from collections.abc import AsyncGenerator, Sequence

from baton.errors import EngineFailed, InvalidRequest
from baton.handlers.admission import admit_embed
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
        """Yield all vectors at once. Raises the errors of `errors.py`; closing the iterator withdraws the work."""
        with self._tracker.track(context, 0, request.model) as tracked:
            self._check_dimensions(request.dimensions)
            inputs = await self._tokens(request.source, tracked)
            tracked.prompt_tokens = sum(len(tokens) for tokens in inputs)
            work = EmbedWork(request_id=tracked.request_id, inputs=inputs, trace_headers=tracked.trace_headers)
            tracked.timeline.mark("submitted")
            vectors = await tracked.scope.wait(self._engine.embed(work))
            if len(vectors) != len(inputs):
                raise EngineFailed(f"the engine returned {len(vectors)} vectors for {len(inputs)} inputs")
            tracked.lifecycle.advance(State.SUBMITTED)
            tracked.first_output()
            encoded = await tracked.scope.wait(asyncio.to_thread(_encode_vectors, vectors, request.dimensions))
            yield Embeddings(model=request.model, vectors=encoded, prompt_tokens=tracked.prompt_tokens)

    def _check_dimensions(self, dimensions: int | None) -> None:
        size, shorter = self._info.embedding_size, self._info.embedding_dimensions
        if dimensions is None or dimensions == size or dimensions in shorter:
            return
        if not shorter:
            raise InvalidRequest(
                f"dimensions: this model's vectors have {size} numbers, and its configuration does not say that it was"
                " trained for fewer; leave the field out"
            )
        allowed = "1 to" if shorter[0] == 1 and len(shorter) == shorter[-1] else f"{', '.join(map(str, shorter))} or"
        raise InvalidRequest(f"dimensions: {dimensions} is not possible; this model's vectors have {allowed} {size}")

    async def _tokens(self, source: Texts | TokenLists, tracked: TrackedRequest) -> tuple[tuple[int, ...], ...]:
        """Return the inputs as tokens. A few texts at a time, so that a request can be cancelled between them."""
        if isinstance(source, TokenLists):
            admit_embed(source.items, self._info)
            return source.items
        inputs: list[tuple[int, ...]] = []
        for first in range(0, len(source.items), TEXTS_AT_ONCE):
            texts = source.items[first : first + TEXTS_AT_ONCE]
            encoded = await tracked.scope.wait(asyncio.to_thread(self._encoder.encode_batch, texts))
            admit_embed(encoded, self._info, first)
            inputs += [tuple(tokens) for tokens in encoded]
        return tuple(inputs)


def _encode_vectors(vectors: "Sequence[array[float]]", dimensions: int | None) -> tuple[str, ...]:
    return tuple(_base64(vector if dimensions is None else _shorten(vector, dimensions)) for vector in vectors)


def _shorten(vector: "array[float]", dimensions: int) -> "array[float]":
    """Return the first `dimensions` numbers, normalised to length 1."""
    kept = vector[:dimensions]
    length = math.hypot(*kept)
    return array("f", [number / length for number in kept]) if length else kept


def _base64(vector: "array[float]") -> str:
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return base64.b64encode(vector).decode("ascii")
