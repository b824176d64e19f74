"""The encode role: encode the media of a prompt and hold the result for the worker that computes the prompt.

    frontend ──request──► encode worker ──► engine.encode, unless the rows are in the embedding store
       ▲                       │  room opened (Lease), rows pinned
       └── ticket, rows ───────┘
    frontend ──the same request, with both──► worker that computes: room claimed, rows fetched, Taken
                                              Lease ended: rows unpinned

Engines that hold what they have encoded return handles instead of rows; engine.abort frees them when the lease ends.

The frontend reads the answer to its end before it continues, so the encoded media outlive the request. They are freed
when they have been read, when the worker that claimed them is lost, and when no worker claims them in time.
"""

import time
from collections.abc import AsyncGenerator

from baton.errors import EngineFailed, InvalidRequest
from baton.handlers.admission import admit_encode
from baton.handlers.leases import LeaseReaper, fail_lease, mark_unread
from baton.handlers.media import LoadedMedia, fetched, media_files, named_media
from baton.handlers.media_encoder import MediaEncoder
from baton.handlers.media_rows import describe, offered_blocks, wait_for_rows
from baton.handlers.placed_prompt import plain_prompt
from baton.handlers.relay import abort
from baton.handlers.tickets import new_ticket, params_of, rows_params
from baton.media.embedding_store import Hold
from baton.ports.engine import EncodeEngine, EncodeWork, EngineInfo
from baton.ports.media import MediaLoader
from baton.ports.runtime import Context
from baton.ports.transfer import Lease, Producer
from baton.protocol.handoff import Ticket
from baton.protocol.lifecycle import State
from baton.protocol.media import MediaFile
from baton.protocol.outputs import Chunk, FinishReason, Usage
from baton.protocol.requests import GenerateRequest
from baton.request.tracker import RequestTracker, TrackedRequest


class EncodeHandler:
    """Encodes media on one engine, for the workers that compute prompts."""

    def __init__(
        self,
        engine: EncodeEngine,
        info: EngineInfo,
        tracker: RequestTracker,
        loader: MediaLoader,
        producer: Producer,
        encoder: MediaEncoder | None = None,
        claim_timeout_s: float = 10.0,
    ) -> None:
        """Prepare. With `encoder`, media are encoded to rows in its store; without, the engine holds them."""
        self._engine = engine
        self._info = info
        self._tracker = tracker
        self._loader = loader
        self._producer = producer
        self._encoder = encoder
        self._claim_timeout_s = claim_timeout_s
        self._reaper = LeaseReaper(engine, tracker.limits)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[Chunk, None]:
        """Yield one chunk, whose `encoder_result` is for the worker that computes the prompt.

        Raises the errors of `errors.py`; closing the iterator before its end frees the encoded media.
        """
        with self._tracker.track(context, len(request.token_ids), request.model) as tracked:
            admit_encode(request, self._info, self._engine.capabilities)
            loaded = await tracked.scope.wait(self._loader.load(named_media(request)))
            tracked.timeline.mark("media_fetched", fetched(loaded))
            prompt = plain_prompt(request, self._info.media)
            lease: Lease | None = None
            media = LoadedMedia()
            tracked.timeline.mark("submitted")
            try:
                if self._encoder is not None:
                    encoding = self._encoder.encode(loaded, prompt, tracked.trace_headers)
                    hold = await wait_for_rows(tracked.scope, encoding)
                    media = LoadedMedia(hold=hold)
                    tracked.timeline.mark("encoded", {"items": len(loaded)})
                    result, lease = self._offer_rows(self._encoder, hold, tracked)
                else:
                    work = EncodeWork(
                        request_id=tracked.request_id,
                        token_ids=prompt,
                        media=media_files(loaded),
                        trace_headers=tracked.trace_headers,
                    )
                    result, lease = await self._offer_handles(work, tracked)
                # The frontend reads the result from the chunk that ends the answer.
                usage = Usage(tracked.prompt_tokens, 0)
                yield Chunk([], finish_reason=FinishReason.STOP, usage=usage, encoder_result=result)
            except BaseException as error:
                self._loader.release(loaded)
                fail_lease(lease, error)
                raise
            finally:
                if lease is not None:
                    self._reaper.watch(tracked.request_id, lease, media)
                else:
                    mark_unread(self._engine, tracked.request_id)
                    await media.close()
                    await abort(self._engine, tracked.request_id, self._tracker.limits.abort_timeout_s)

    async def probe(self, prompt: tuple[int, ...], image: MediaFile, context: Context) -> None:
        """Let the engine encode `image`, and free it. Raises the errors of the engine.

        The image is a good one and `prompt` has a place for it, so an engine that refuses them has failed.
        """
        with self._tracker.track(context, len(prompt)) as tracked:
            work = EncodeWork(request_id=tracked.request_id, token_ids=prompt, media=(image,))
            try:
                await tracked.scope.wait(self._engine.encode(work))
            except InvalidRequest as refusal:
                raise EngineFailed(f"the engine refuses to encode the probe: {refusal.message}") from refusal
            finally:
                mark_unread(self._engine, tracked.request_id)
                await abort(self._engine, tracked.request_id, self._tracker.limits.abort_timeout_s)

    def _offer_rows(
        self, encoder: MediaEncoder, hold: Hold, tracked: TrackedRequest
    ) -> tuple[dict[str, object], Lease]:
        ticket, lease = self._open_room(tracked)
        lease.computed(offered_blocks(hold))
        media = describe(hold, encoder.store, self._producer.address, self._claim_timeout_s)
        return rows_params(ticket, media), lease

    async def _offer_handles(self, work: EncodeWork, tracked: TrackedRequest) -> tuple[dict[str, object], Lease]:
        encoded = await tracked.scope.wait(self._engine.encode(work))
        tracked.timeline.mark("encoded", {"items": len(work.media)})
        ticket, lease = self._open_room(tracked)
        return params_of(ticket, encoded.params or {}), lease

    def _open_room(self, tracked: TrackedRequest) -> tuple[Ticket, Lease]:
        tracked.scope.check()
        tracked.lifecycle.advance(State.SUBMITTED)
        tracked.first_output_at = time.perf_counter()
        tracked.lifecycle.advance(State.STREAMING)
        ticket = new_ticket(self._producer.address, 0, 1)
        lease = self._producer.offer(ticket, tracked.prompt_tokens)
        tracked.timeline.mark("kv_offered", {"room": ticket.room, "kind": "media"})
        return ticket, lease
