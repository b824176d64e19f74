"""The aggregated role in text format: this worker owns the tokenizer, the chat template and the stop strings."""

import asyncio
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from functools import partial

from baton.errors import InvalidRequest, Unsupported
from baton.handlers.admission import admit
from baton.handlers.relay import relay
from baton.handlers.stop_strings import StopMatcher
from baton.ports.engine import EngineInfo, GenerateEngine
from baton.ports.runtime import Context
from baton.ports.tokenizer import Tokenizer
from baton.protocol.outputs import Chunk, FinishReason, Usage
from baton.protocol.requests import GenerateRequest, Routing
from baton.protocol.text import TextChunk, TextRequest
from baton.request.tracker import RequestTracker, TrackedRequest


class TextHandler:
    """Generates text from text on one engine."""

    def __init__(
        self,
        engine: GenerateEngine,
        info: EngineInfo,
        tracker: RequestTracker,
        tokenizer: Tokenizer,
        other_names: Collection[str] = (),
    ) -> None:
        """Prepare. `other_names` are those of the model beside the one in `info`; all others are LoRA adapters."""
        self._engine = engine
        self._info = info
        self._tracker = tracker
        self._tokenizer = tokenizer
        self._names = frozenset((info.model_name, *other_names))

    async def generate(self, request: TextRequest, context: Context) -> AsyncGenerator[TextChunk, None]:
        """Yield the answer in chunks of text. Raises the errors of `errors.py`."""
        with self._tracker.track(context, 0, request.model) as tracked:
            tokens = await tracked.scope.wait(asyncio.to_thread(self._tokenize, request))
            tracked.prompt_tokens = len(tokens)
            inner = GenerateRequest(
                token_ids=tuple(tokens),
                model=request.model,
                stop=request.stop_conditions(),
                sampling=request.sampling(),
                extra_args=request.extra_args,
                routing=Routing(lora_name=self._adapter_of(request)),
            )
            work = admit(inner, tracked.request_id, self._info, self._engine.capabilities, context.trace_headers)
            answer = _Answer(request, context, self._tokenizer, inner.choices)
            async with aclosing(relay(self._engine, work, tracked, self._tracker.limits)) as chunks:
                async for chunk in chunks:
                    for text in answer.push(chunk, tracked):
                        yield text
                    if answer.complete:
                        break

    def _adapter_of(self, request: TextRequest) -> str | None:
        """Return the LoRA adapter that the request names as its model, if it does."""
        return request.model if self._engine.capabilities.lora and request.model not in self._names else None

    def _tokenize(self, request: TextRequest) -> list[int]:
        for field in request.token_format_only():
            raise Unsupported(f"{field}: workers with --model-input text do not support it; use --model-input tokens")
        if request.messages is not None:
            if not request.messages:
                raise InvalidRequest("messages: the list is empty")
            return self._tokenizer.encode(self._tokenizer.render_chat(request.messages, request.template_args))
        match request.prompt:
            case str(text) | (str(text),):
                return self._tokenizer.encode(text)
            case tuple(tokens) if all(isinstance(token, int) for token in tokens):
                return [int(token) for token in tokens]
            case _:
                raise InvalidRequest("prompt: expected one text or one list of token ids")


class _Answer:
    """The text of every choice so far."""

    def __init__(self, request: TextRequest, context: Context, tokenizer: Tokenizer, choices: int) -> None:
        chat = request.messages is not None
        self._wants_usage = request.wants_usage
        self._chunk = partial(
            TextChunk,
            request_id=("chatcmpl-" if chat else "cmpl-") + context.id,
            model=request.model,
            created=int(time.time()),
            chat=chat,
        )
        self._decoders = [tokenizer.decoder() for _ in range(choices)]
        self._stops = [StopMatcher(request.stops) for _ in range(choices)]
        self._open = set(range(choices))
        self._begun: set[int] = set()
        self._tokens = 0

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return not self._open

    def push(self, chunk: Chunk, tracked: TrackedRequest) -> list[TextChunk]:
        """Return the text chunks to send after `chunk`."""
        index, stops = chunk.index, self._stops[chunk.index]
        if index not in self._open:
            return []
        text = self._decode(index, chunk.token_ids)
        reason = FinishReason.STOP if stops.stopped else chunk.finish_reason
        if reason is not None:
            text += stops.flush()
            self._open.discard(index)
        elif not text:
            return []
        first = index not in self._begun
        self._begun.add(index)
        chunks = [self._chunk(text=text, index=index, first=first, finish_reason=reason)]
        if self.complete and self._wants_usage:
            usage = Usage(tracked.prompt_tokens, self._tokens, tracked.cached_tokens)
            chunks.append(self._chunk(text="", usage=usage))
        return chunks

    def _decode(self, index: int, token_ids: list[int]) -> str:
        """Return the text of these tokens; tokens after a stop string are neither sent nor counted."""
        decoder, stops = self._decoders[index], self._stops[index]
        text = ""
        for token in token_ids:
            text += stops.push(decoder.push((token,)))
            self._tokens += 1
            if stops.stopped:
                break
        return text
