"""The decode role: continue from KV that a prefill worker has computed."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from baton.errors import Unsupported
from baton.handlers.admission import admit
from baton.handlers.bad_words import with_bad_words
from baton.handlers.kv_handoff import ConsumeByEngine, ConsumeByImport, KvHandoff, moved_by
from baton.handlers.media import LoadedMedia, MediaInput
from baton.handlers.prompt_data import no_tokens, without_tokens
from baton.handlers.relay import relay
from baton.handlers.tickets import cached_tokens_of, engine_params, ticket_of
from baton.ports.engine import EngineInfo, GenerateEngine, KvImportEngine, Work
from baton.ports.runtime import Context, SendNow
from baton.ports.tokenizer import TokenTexts
from baton.ports.transfer import Claim, Consumer
from baton.protocol.handoff import Bootstrap, Consume, PrefillResult, Ticket
from baton.protocol.outputs import Chunk, TokenDelta
from baton.protocol.requests import GenerateRequest
from baton.request.tracker import RequestTracker, TrackedRequest


class DecodeHandler:
    """Generates tokens on one engine, from KV of prefill workers; a request without any is computed here."""

    def __init__(
        self,
        engine: GenerateEngine,
        info: EngineInfo,
        tracker: RequestTracker,
        consumer: Consumer,
        media_input: MediaInput | None = None,
        texts: TokenTexts | None = None,
    ) -> None:
        self._engine = engine
        self._texts = texts
        self._importer = engine if isinstance(engine, KvImportEngine) and info.kv is not None else None
        self._info = info
        self._tracker = tracker
        self._consumer = consumer
        self._media_input = media_input or MediaInput(engine.capabilities, info)

    async def generate(
        self, request: GenerateRequest, context: Context, send_now: SendNow[TokenDelta] | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the answer in chunks, or send its tokens with `send_now`, in order.

        Raises the errors of `errors.py`; closing the iterator aborts the request.
        """
        ticket = ticket_of(request)
        claim: Claim | None = None
        handoff: KvHandoff | None = None
        try:
            with self._tracker.track(context, len(request.token_ids), request.model) as tracked:
                scores_only = request.scores_only
                if scores_only:
                    request, send_now = request.for_scoring(), None
                elif request.stop.max_tokens == 0:
                    async for chunk in no_tokens(request, self._texts, tracked):
                        yield chunk
                    return
                self._refuse_impossible(request)
                consume: Consume | None = None

                def admitted(token_ids: tuple[int, ...]) -> Work:
                    can, prompt = self._engine.capabilities, request.with_prompt(token_ids)
                    return admit(prompt, tracked.request_id, self._info, can, tracked.trace_headers, consume)

                if ticket is None:
                    self._media_input.check(request)
                work = admitted(request.token_ids)
                if ticket is not None:
                    claim, handoff = self._claim(request, ticket, tracked)
                    consume = Consume(source=await self._source(request, ticket, claim, tracked))
                    work = msgspec.structs.replace(work, handoff=consume)
                async with await self._media(request, claim, tracked) as media:
                    work = await with_bad_words(media.attach(work, tracked, admitted), self._texts, tracked)
                    async with aclosing(
                        relay(
                            self._engine,
                            work,
                            tracked,
                            self._tracker.limits,
                            handoff,
                            self._texts,
                            send_now=send_now,
                        )
                    ) as chunks:
                        async for chunk in chunks:
                            media.used()
                            yield without_tokens(chunk) if scores_only else chunk
        finally:
            if claim is not None:
                await claim.close()
            elif ticket is not None:
                self._consumer.decline(ticket)

    def _refuse_impossible(self, request: GenerateRequest) -> None:
        if request.bootstrap is None and request.prefill_result is None and self._engine.capabilities.needs_kv:
            raise Unsupported("this worker only continues from KV of prefill workers, and the request names none")
        if request.bootstrap is not None and request.choices > 1:
            # With early handoff the frontend may stop reading after the first choice that ends.
            raise Unsupported(
                "n: the frontend loses choices of an answer whose prefill runs elsewhere; ask for one at a time, or"
                " start the prefill workers with --kv-handoff late"
            )

    def _claim(self, request: GenerateRequest, ticket: Ticket, tracked: TrackedRequest) -> tuple[Claim, KvHandoff]:
        tracked.timeline.mark("kv_claimed", {"from": f"{ticket.host}:{ticket.port}", "room": ticket.room})
        importer = self._importer
        if importer is None:
            claim = self._consumer.claim(ticket, lambda: None, tracked.scope.fire)
            return claim, ConsumeByEngine(claim, cached_tokens_of(request.prefill_result), tracked)

        def arrived() -> None:
            tracked.timeline.mark("kv_moved", moved_by(claim))
            importer.received(tracked.request_id)

        claim = self._consumer.claim(ticket, arrived, tracked.scope.fire)
        return claim, ConsumeByImport(claim)

    async def _source(
        self, request: GenerateRequest, ticket: Ticket, claim: Claim, tracked: TrackedRequest
    ) -> Bootstrap | PrefillResult:
        """Return where the engine finds the KV. Raises PeerLost, or the error that the cancel scope fires with."""
        if request.prefill_result is not None:
            return engine_params(request.prefill_result)
        if self._importer is not None and request.bootstrap is not None:
            return request.bootstrap
        host, port = await tracked.scope.wait(claim.bootstrap_address())
        return Bootstrap(host=host, port=port, room=ticket.room)

    async def _media(self, request: GenerateRequest, claim: Claim | None, tracked: TrackedRequest) -> LoadedMedia:
        if claim is not None:
            return await self._media_input.from_prefill(request, claim, tracked)
        return await self._media_input.load(request, tracked)
