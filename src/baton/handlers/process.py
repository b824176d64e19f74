"""The process role: text in and text out, in front of language workers that take tokens.

For models whose chat template the frontend cannot apply. The worker has the tokenizer and the template, and no engine.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from baton.errors import BatonError, EngineFailed, InvalidRequest, PeerLost, Unsupported
from baton.handlers.chat_media import media_of, without_data
from baton.handlers.text_answer import TextAnswer
from baton.handlers.text_prompt import tokenize
from baton.ports.runtime import Context, ModelClient, Wire
from baton.ports.tokenizer import Tokenizer, TokenTexts
from baton.protocol.codec import DecodeError, decode_chunk, encode_request
from baton.protocol.outputs import Chunk
from baton.protocol.requests import GenerateRequest
from baton.protocol.text import TextChunk, TextRequest
from baton.request.forwarded_context import ForwardedContext
from baton.request.tracker import RequestTracker, TrackedRequest


class ProcessHandler:
    """Generates text from text with the language workers behind `model`."""

    def __init__(
        self,
        model: ModelClient,
        tracker: RequestTracker,
        tokenizer: Tokenizer,
        texts: TokenTexts,
    ) -> None:
        self._model = model
        self._tracker = tracker
        self._tokenizer = tokenizer
        self._texts = texts

    async def generate(self, request: TextRequest, context: Context) -> AsyncGenerator[TextChunk, None]:
        """Yield the answer in chunks of text. Raises the errors of `errors.py`, those of the language workers too.

        Closing the iterator cancels the request at the language workers.
        """
        with self._tracker.track(context, 0, request.model) as tracked:
            wire, tracked.prompt_tokens = await tracked.scope.wait(asyncio.to_thread(self._prepare, request))
            tracked.submitted()
            answer = TextAnswer(request, context, self._tokenizer, self._texts)
            async with aclosing(self._call(wire, tracked, context)) as chunks:
                async for chunk in chunks:
                    for text in answer.push(chunk, tracked):
                        yield text
                    tracked.completion_tokens = answer.tokens
                    if answer.complete and not answer.is_generated:
                        return  # and the language worker stops
            if not answer.complete:
                raise PeerLost("the language worker ended the stream without a finish reason")

    async def _call(self, request: Wire, tracked: TrackedRequest, context: Context) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of the language workers, with the prompt's counts in `tracked`."""
        counts = _PromptCounts(tracked)
        call = self._model.call(request, ForwardedContext(context, tracked))
        try:
            async with aclosing(call) as replies:
                async for reply in replies:
                    chunk = _read(reply)
                    counts.take(chunk)
                    yield chunk
        except BatonError as error:
            tracked.scope.check()
            if error.scope == "worker":  # of another process: this one goes on
                raise PeerLost(f"the language worker failed: {error.message}") from error
            raise

    def _prepare(self, request: TextRequest) -> tuple[Wire, int]:
        """Return the request in token format, and how many tokens it has. Raises InvalidRequest."""
        for field in request.never_applied():
            raise Unsupported(f"{field}: process workers do not support it")
        try:
            guided = request.guided_decoding()
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        chat, extra_args = request.messages or (), request.extra_args
        if media := media_of(chat):
            extra_args = {**extra_args, "messages": without_data(chat)}
        inner = GenerateRequest(
            token_ids=tuple(tokenize(request, self._tokenizer, request.template_args | request.template_tools)),
            model=request.model,
            stop=request.stop_conditions(),
            sampling=msgspec.structs.replace(request.sampling(), guided_decoding=guided),
            output=request.output_options(),
            diffusion=request.diffusion,
            routing=request.routing(),
            media=media or None,
            extra_args=extra_args,
            extra={"router": request.router_targets} if request.router_targets else {},
        )
        return encode_request(inner), len(inner.token_ids)


def _read(reply: Wire) -> Chunk:
    try:
        return decode_chunk(reply)
    except DecodeError as error:
        raise EngineFailed(str(error)) from None


class _PromptCounts:
    """The prompt tokens that the language worker counts, with those of media.

    The first count holds: after a move to another worker, the prompt has the tokens that were generated before.
    """

    def __init__(self, tracked: TrackedRequest) -> None:
        self._tracked = tracked
        self._prompt_tokens: int | None = None

    def take(self, chunk: Chunk) -> None:
        """Note the first output, and what the usage of a chunk says about the prompt."""
        tracked, usage = self._tracked, chunk.usage
        tracked.output()
        if usage is None:
            return
        if self._prompt_tokens is None:
            self._prompt_tokens = tracked.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens == self._prompt_tokens and usage.cached_tokens is not None:
            tracked.cached_tokens = usage.cached_tokens
