"""The aggregated role in text format: this worker owns the tokenizer, the chat template and the stop strings."""

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing

import msgspec

from baton.errors import Unsupported
from baton.handlers.admission import admit
from baton.handlers.relay import relay
from baton.handlers.text_answer import TextAnswer
from baton.handlers.text_prompt import tokenize
from baton.ports.engine import EngineInfo, GenerateEngine
from baton.ports.runtime import Context
from baton.ports.tokenizer import Tokenizer
from baton.protocol.requests import GenerateRequest
from baton.protocol.text import TextChunk, TextRequest
from baton.request.tracker import RequestTracker


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
                diffusion=request.diffusion,
                extra_args=request.extra_args,
                routing=msgspec.structs.replace(request.routing(), lora_name=self._adapter_of(request)),
            )
            work = admit(inner, tracked.request_id, self._info, self._engine.capabilities, tracked.trace_headers)
            answer = TextAnswer(request, context, self._tokenizer)
            async with aclosing(relay(self._engine, work, tracked, self._tracker.limits)) as chunks:
                async for chunk in chunks:
                    for text in answer.push(chunk, tracked):
                        yield text
                    if answer.complete:
                        break

    def _adapter_of(self, request: TextRequest) -> str | None:
        """Return the LoRA adapter that the request names as its model, if it does."""
        return request.model if self._engine.capabilities.lora and request.model not in self._names else None

    def _tokenize(self, request: TextRequest) -> Sequence[int]:
        for field in request.token_format_only():
            raise Unsupported(f"{field}: workers with --model-input text do not support it; use --model-input tokens")
        return tokenize(request, self._tokenizer, request.template_args)
