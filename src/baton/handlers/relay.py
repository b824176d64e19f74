"""From an engine's stream to chunks: merged, counted, and aborted unless every choice has finished."""

import asyncio
import logging
from collections.abc import AsyncGenerator

from baton.errors import BatonError, EngineDead, EngineFailed
from baton.handlers.kv_handoff import KvHandoff
from baton.handlers.media import LoadedMedia
from baton.handlers.prompt_data import PromptReport
from baton.ports.engine import AbortableEngine, GenerateEngine, Stream, Work
from baton.ports.runtime import SendNow
from baton.ports.tokenizer import TokenTexts
from baton.protocol.ids import RequestId
from baton.protocol.lifecycle import State
from baton.protocol.outputs import (
    Chunk,
    Finished,
    HandoffReady,
    Output,
    PromptCached,
    TokenDelta,
    Usage,
)
from baton.request.tracker import RequestLimits, TrackedRequest

log = logging.getLogger(__name__)


class EngineKilled(EngineFailed):
    """The engine died with this request alone in it, so the request is the likely cause and would kill the next engine
    too. The worker ends as it does for EngineDead; to everyone else this is an EngineFailed, which does not move."""

    scope = "worker"


async def relay(
    engine: GenerateEngine,
    work: Work,
    tracked: TrackedRequest,
    limits: RequestLimits,
    handoff: KvHandoff | None = None,
    texts: TokenTexts | None = None,
    media: LoadedMedia | None = None,
    send_now: SendNow[TokenDelta] | None = None,
) -> AsyncGenerator[Chunk, None]:
    """Submit `work` and yield its chunks; the last one carries the finish reason and the usage.

    The first one has the cached tokens too: a frontend that finds a stop string never reads the last. Between the two,
    tokens alone are sent with `send_now`, if there is one.

    Chunks are sent as soon as there is something to send, but at most once every `flush_interval_s`: tokens that come
    faster are joined. When the iterator ends before the last chunk, the handoff has ended and the engine has confirmed
    an abort or exceeded `abort_timeout_s`. `media` are closed only after that.
    """
    tracked.scope.check()
    answer = _Answer(work, tracked, send_now)
    report = PromptReport(work, texts)
    try:
        stream = engine.submit(work)
        tracked.submitted()
        tracked.follow(stream.progress)
        tracked.scope.on_fire(stream.fail)
        for chunk in handoff.begin() if handoff is not None else ():
            yield chunk
        clock = asyncio.get_running_loop().time
        not_before = 0.0
        while answer.open_choices:
            outputs = _filtered(await stream.read(not_before), handoff)
            not_before = clock() + limits.flush_interval_s
            for chunk in await report.take(outputs, tracked) if report.pending else ():
                yield chunk
            for chunk in answer.push(outputs):
                yield chunk
            answer.send_from(stream, report, limits.flush_interval_s)
    except EngineDead as error:
        _blame_if_alone(tracked, error)
        raise
    finally:
        finished = not answer.open_choices
        if handoff is not None or not finished:
            # A second cancellation ends the wait, not the clean-up.
            await asyncio.shield(_release(engine, work, limits, handoff, finished, media))


def _filtered(outputs: list[Output], handoff: KvHandoff | None) -> list[Output]:
    if not outputs:
        raise EngineFailed("the engine ended the stream without a finish reason")
    return outputs if handoff is None else handoff.filter(outputs)


def _blame_if_alone(tracked: TrackedRequest, death: EngineDead) -> None:
    """Raise EngineKilled if the request was alone in its engine when that died, and nothing else ended it."""
    in_engine = tracked.lifecycle.state in (State.SUBMITTED, State.STREAMING)
    if in_engine and tracked.scope.error is None and tracked.gate.alone_when_engine_died():
        raise EngineKilled(f"the engine died with this request alone in it: {death.message}") from death


async def _release(
    engine: GenerateEngine,
    work: Work,
    limits: RequestLimits,
    handoff: KvHandoff | None,
    finished: bool,
    media: LoadedMedia | None,
) -> None:
    """End the handoff, then abort what has not finished: no KV may be written into blocks that are free.

    Media that the engine may still read are closed after that: a caller that is cancelled again closes its own at once.
    """
    async with LoadedMedia() if finished or media is None else media.transfer():
        try:
            if handoff is not None:
                await handoff.end()
        finally:
            if not finished:
                await abort(engine, work.request_id, limits.abort_timeout_s)


class _Answer:
    """The chunks and the counts of one request."""

    __slots__ = ("_send_now", "_tracked", "open_choices")

    def __init__(self, work: Work, tracked: TrackedRequest, send_now: SendNow[TokenDelta] | None) -> None:
        self._send_now = send_now
        self._tracked = tracked
        self.open_choices = work.sampling.n or 1

    def send_from(self, stream: Stream, report: PromptReport, interval_s: float) -> None:
        """From now on send tokens of `stream` as they come, if the first ones and the report have been sent."""
        send_now, tracked = self._send_now, self._tracked
        if send_now is None or report.pending or not tracked.completion_tokens:
            return
        self._send_now = None

        def send(delta: TokenDelta) -> bool:
            if not send_now(delta):
                return False
            tracked.output()
            tracked.completion_tokens += len(delta.token_ids)
            return True

        stream.pass_to(send, interval_s)

    def push(self, outputs: list[Output]) -> list[Chunk]:
        """Return the chunks to send for `outputs`."""
        if not outputs:
            return []
        tracked = self._tracked
        tracked.output()
        if len(outputs) == 1 and isinstance(delta := outputs[0], TokenDelta):  # nearly always
            token_ids = delta.token_ids
            tracked.completion_tokens += len(token_ids)
            return [Chunk(token_ids, delta.index, delta.logprobs)]
        return self._merge(outputs)

    def _merge(self, outputs: list[Output]) -> list[Chunk]:
        """Return one chunk for each choice with output; the first chunks and the last one carry the usage."""
        deltas: dict[int, TokenDelta] = {}
        usage: Usage | None = None
        ends: list[Finished] = []
        handoffs: list[Chunk] = []
        for output in outputs:
            match output:
                case TokenDelta():
                    deltas[output.index] = output
                    self._tracked.completion_tokens += len(output.token_ids)
                case PromptCached():
                    self._tracked.cached_tokens = output.tokens
                    self._tracked.prompt_tokens = output.prompt_tokens or self._tracked.prompt_tokens
                    usage = Usage(self._tracked.prompt_tokens, 0, output.tokens)
                case Finished():
                    ends.append(output)
                case HandoffReady():
                    handoffs.append(Chunk([], disaggregated_params=output.params))
        last_chunks = [self._end_choice(end, deltas.pop(end.index, None)) for end in ends]
        running = [Chunk(delta.token_ids, delta.index, delta.logprobs, usage=usage) for delta in deltas.values()]
        return [*running, *handoffs, *last_chunks]

    def _end_choice(self, end: Finished, delta: TokenDelta | None) -> Chunk:
        tracked = self._tracked
        self.open_choices -= 1
        if end.cached_tokens is not None:
            tracked.cached_tokens = end.cached_tokens
        usage = None
        if not self.open_choices:
            usage = Usage(tracked.prompt_tokens, tracked.completion_tokens, tracked.cached_tokens)
        tokens, logprobs = (delta.token_ids, delta.logprobs) if delta else ([], None)
        return Chunk(tokens, end.index, logprobs, end.reason, end.stop_reason, usage)


async def abort(engine: AbortableEngine, request_id: RequestId, abort_timeout_s: float) -> None:
    """Abort at the engine, even if the calling task is cancelled; stop waiting after `abort_timeout_s`."""
    task = asyncio.ensure_future(engine.abort(request_id))
    try:
        async with asyncio.timeout(abort_timeout_s):
            await asyncio.shield(task)
    except TimeoutError:
        log.error("%s the engine did not confirm an abort within %g s", request_id, abort_timeout_s)
        task.cancel()
    except BatonError as error:  # logged, not raised: it would replace the error that ended the request
        log.error("%s the engine did not abort: %s", request_id, error.message)
