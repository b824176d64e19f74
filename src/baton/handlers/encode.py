"""The encode role: turn the media of a prompt into what a model computes with, and hold that for who computes.

    frontend ──request──► encode worker ──► engine.encode
       ▲                       │  room opened (Lease)
       └── ticket, handles ────┘
    frontend ──the same request, with both──► worker that computes: room claimed, handles read, Taken
                                              Lease ended, engine.abort frees them

The frontend reads the answer to its end before it goes on, so what was made outlives the call. It is freed when it has
been used, when whoever claimed it is gone, and when nobody comes in time.
"""

import logging
import time
from collections.abc import AsyncGenerator

from baton.errors import BatonError, InvalidRequest, PeerLost, Unsupported
from baton.handlers.leases import LeaseReaper
from baton.handlers.media import LoadedMedia, named_media
from baton.handlers.relay import abort
from baton.handlers.tickets import new_ticket, params_of
from baton.ports.engine import EncodeEngine, EncodeWork
from baton.ports.media import MediaLoader
from baton.ports.runtime import Context
from baton.ports.transfer import Lease, Producer
from baton.protocol.lifecycle import State
from baton.protocol.media import MediaFile, MediaUrl
from baton.protocol.outputs import Chunk, FinishReason, Usage
from baton.protocol.requests import GenerateRequest
from baton.request.tracker import RequestTracker, TrackedRequest

log = logging.getLogger(__name__)


class EncodeHandler:
    """Encodes on one engine, for others."""

    def __init__(self, engine: EncodeEngine, tracker: RequestTracker, loader: MediaLoader, producer: Producer) -> None:
        self._engine = engine
        self._tracker = tracker
        self._loader = loader
        self._producer = producer
        self._keeper = LeaseReaper(engine, tracker.limits.abort_timeout_s)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[Chunk, None]:
        """Yield one chunk, whose `encoder_result` is for whoever computes the prompt. Closing it before frees all."""
        with self._tracker.track(context, len(request.token_ids)) as tracked:
            named = self._named(request)
            work = EncodeWork(
                request_id=tracked.request_id,
                token_ids=request.token_ids,
                media=await tracked.scope.wait(self._loader.load(named)),
                trace_headers=context.trace_headers,
            )
            lease: Lease | None = None
            try:
                result, lease = await self._make(work, tracked)
                # The frontend takes the chunk that ends the answer.
                usage = Usage(tracked.prompt_tokens, 0)
                yield Chunk([], finish_reason=FinishReason.STOP, usage=usage, encoder_result=result)
            except BaseException as error:
                if lease is not None:
                    lease.fail(error if isinstance(error, BatonError) else PeerLost("the call was ended"))
                raise
            finally:
                if lease is not None:
                    self._keeper.keep(work.request_id, lease, LoadedMedia())
                else:
                    await abort(self._engine, work.request_id, self._tracker.limits.abort_timeout_s)

    async def trial(self, prompt: tuple[int, ...], picture: MediaFile, context: Context) -> None:
        """Have the engine encode `picture`, and free it. Raises what is wrong with the engine.

        That it refuses the prompt is an answer: not every model says how a prompt with a picture is written.
        """
        with self._tracker.track(context, len(prompt)) as tracked:
            work = EncodeWork(request_id=tracked.request_id, token_ids=prompt, media=(picture,))
            try:
                await tracked.scope.wait(self._engine.encode(work))
            except InvalidRequest as refusal:
                log.debug("%s the trial was refused: %s", tracked.request_id, refusal.message)
            finally:
                await abort(self._engine, tracked.request_id, self._tracker.limits.abort_timeout_s)

    async def _make(self, work: EncodeWork, tracked: TrackedRequest) -> tuple[dict[str, object], Lease]:
        encoded = await tracked.scope.wait(self._engine.encode(work))
        tracked.scope.check()
        tracked.lifecycle.advance(State.SUBMITTED)
        tracked.first_output_at = time.perf_counter()
        tracked.lifecycle.advance(State.STREAMING)
        ticket = new_ticket(self._producer.address, 0, 1)
        lease = self._producer.offer(ticket, tracked.prompt_tokens)
        return params_of(ticket, encoded.params), lease

    def _named(self, request: GenerateRequest) -> tuple[MediaUrl, ...]:
        """Return what is to be encoded. Raises InvalidRequest or Unsupported before anything is fetched."""
        can = self._engine.capabilities
        if not request.token_ids:
            raise InvalidRequest("token_ids: the prompt is empty")
        named = named_media(request)
        if not named:
            raise InvalidRequest("multi_modal_data: there is nothing to encode")
        for each in named:
            if each.modality not in can.modalities:
                raise Unsupported(f"{each.place}: this engine encodes {', '.join(sorted(can.modalities))} only")
        return named
