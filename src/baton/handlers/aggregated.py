"""The aggregated role: one worker does prefill and decode."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from baton.handlers.admission import admit
from baton.handlers.bad_words import with_bad_words
from baton.handlers.media import MediaInput
from baton.handlers.prompt_data import no_tokens, without_tokens
from baton.handlers.relay import relay
from baton.ports.engine import EngineInfo, GenerateEngine, Work
from baton.ports.runtime import Context, SendNow
from baton.ports.tokenizer import TokenTexts
from baton.protocol.outputs import Chunk, TokenDelta
from baton.protocol.requests import GenerateRequest
from baton.request.tracker import RequestTracker


class AggregatedHandler:
    """Generates tokens from tokens on one engine."""

    def __init__(
        self,
        engine: GenerateEngine,
        info: EngineInfo,
        tracker: RequestTracker,
        media_input: MediaInput | None = None,
        texts: TokenTexts | None = None,
    ) -> None:
        self._engine = engine
        self._info = info
        self._tracker = tracker
        self._media_input = media_input or MediaInput(engine.capabilities, info)
        self._texts = texts

    async def generate(
        self, request: GenerateRequest, context: Context, send_now: SendNow[TokenDelta] | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the answer in chunks, or send its tokens with `send_now`, in order.

        Raises the errors of `errors.py`; closing the iterator aborts the request.
        """
        with self._tracker.track(context, len(request.token_ids), request.model) as tracked:
            scores_only = request.scores_only
            if scores_only:
                request, send_now = request.for_scoring(), None
            elif request.stop.max_tokens == 0:
                async for chunk in no_tokens(request, self._texts, tracked):
                    yield chunk
                return

            def admitted(token_ids: tuple[int, ...]) -> Work:
                prompt = request.with_prompt(token_ids)
                return admit(prompt, tracked.request_id, self._info, self._engine.capabilities, tracked.trace_headers)

            self._media_input.check(request)
            work = admitted(request.token_ids)
            async with await self._media_input.load(request, tracked) as media:
                work = await with_bad_words(media.attach(work, tracked, admitted), self._texts, tracked)
                async with aclosing(
                    relay(
                        self._engine,
                        work,
                        tracked,
                        self._tracker.limits,
                        texts=self._texts,
                        media=media,
                        send_now=send_now,
                    )
                ) as chunks:
                    async for chunk in chunks:
                        media.used()
                        yield without_tokens(chunk) if scores_only else chunk
