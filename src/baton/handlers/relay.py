"""From an engine's stream to chunks: merged, counted, and aborted on every way out but the regular one."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from typing import Protocol

from baton.errors import BatonError, EngineFailed
from baton.ports.engine import AbortableEngine, GenerateEngine, Work
from baton.protocol.ids import RequestId
from baton.protocol.lifecycle import State
from baton.protocol.outputs import Chunk, Finished, HandoffReady, Logprobs, Output, TokenDelta, Usage
from baton.request.tracker import RequestLimits, TrackedRequest

log = logging.getLogger(__name__)


class Handover(Protocol):
    """What a role does about KV that comes from another worker, or goes to one, while its work runs."""

    def begin(self) -> list[Chunk]:
        """The engine knows the work; return what is to be sent before anything else. May raise, like the engine."""

    def take(self, outputs: list[Output]) -> list[Output]:
        """See to what is said about KV; return the rest."""

    async def end(self) -> None:
        """The work is about to be aborted, or has ended: see that nobody fetches anything for it any more."""


async def relay(
    engine: GenerateEngine, work: Work, tracked: TrackedRequest, limits: RequestLimits, handover: Handover | None = None
) -> AsyncGenerator[Chunk, None]:
    """Submit `work` and yield its chunks; the last one carries the finish reason and the usage.

    Chunks leave as soon as there is something to send, but at most once every `flush_interval_s`: tokens that come
    faster are joined. When the iterator ends before the last chunk, the engine has confirmed an abort or has run out of
    `abort_timeout_s`.
    """
    tracked.scope.check()
    open_choices = work.sampling.n or 1
    stream = engine.submit(work)
    tracked.lifecycle.advance(State.SUBMITTED)
    try:
        tracked.scope.on_fire(stream.fail)
        for chunk in handover.begin() if handover is not None else ():
            yield chunk
        clock = asyncio.get_running_loop().time
        not_before = 0.0
        while open_choices:
            outputs = await stream.read(not_before)
            not_before = clock() + limits.flush_interval_s
            if not outputs:
                raise EngineFailed("the engine ended the stream without a finish reason")
            if handover is not None and not (outputs := handover.take(outputs)):
                continue
            if tracked.first_output_at is None:
                tracked.first_output_at = time.perf_counter()
                tracked.lifecycle.advance(State.STREAMING)
            if len(outputs) == 1 and isinstance(delta := outputs[0], TokenDelta):  # nearly always
                tracked.completion_tokens += len(delta.token_ids)
                yield Chunk(delta.token_ids, delta.index, delta.logprobs)
                continue
            open_choices -= sum(type(output) is Finished for output in outputs)
            for chunk in _chunks(outputs, work, tracked, last=not open_choices):
                yield chunk
    finally:
        if handover is not None:
            await handover.end()
        if open_choices:
            await abort(engine, work.request_id, limits.abort_timeout_s)


def _chunks(outputs: list[Output], work: Work, tracked: TrackedRequest, last: bool) -> list[Chunk]:
    """Return one chunk for each choice that has something to say; usage is on the very last one."""
    deltas: dict[int, TokenDelta] = {}
    ends: list[Finished] = []
    chunks: list[Chunk] = []
    for output in outputs:
        match output:
            case TokenDelta():
                deltas[output.index] = output
                tracked.completion_tokens += len(output.token_ids)
            case Finished():
                ends.append(output)
                if output.cached_tokens is not None:
                    tracked.cached_tokens = output.cached_tokens
            case HandoffReady():
                chunks.append(Chunk([], disaggregated_params=output.params))
    for end in ends:
        delta = deltas.pop(end.index, None)
        usage = _usage(tracked) if last and end is ends[-1] else None
        tokens, logprobs = (delta.token_ids, delta.logprobs) if delta else ([], None)
        prompt = None if end.prompt_logprobs is None else _by_token(work.token_ids, end.prompt_logprobs)
        chunks.append(Chunk(tokens, end.index, logprobs, end.reason, end.stop_reason, usage, prompt_logprobs=prompt))
    chunks[:0] = [Chunk(delta.token_ids, delta.index, delta.logprobs) for delta in deltas.values()]
    return chunks


def _by_token(prompt: tuple[int, ...], logprobs: Logprobs) -> list[dict[str, dict[str, float]] | None]:
    """Return one entry for each token of the prompt: nothing for the first, else the token's own and alternatives."""
    entries: list[dict[str, dict[str, float]] | None] = [None]
    for number, (token, chosen) in enumerate(zip(prompt[1:], logprobs.chosen, strict=True)):
        entry = {str(token): {"logprob": chosen}}
        for top in logprobs.top[number] if logprobs.top else ():
            entry.setdefault(str(top.token_id), {"logprob": top.logprob})
        entries.append(entry)
    return entries


def _usage(tracked: TrackedRequest) -> Usage:
    return Usage(tracked.prompt_tokens, tracked.completion_tokens, tracked.cached_tokens)


async def abort(engine: AbortableEngine, request_id: RequestId, abort_timeout_s: float) -> None:
    """Abort at the engine even if our own task is being cancelled; give up waiting after `abort_timeout_s`."""
    task = asyncio.ensure_future(engine.abort(request_id))
    try:
        await asyncio.wait_for(asyncio.shield(task), abort_timeout_s)
    except TimeoutError:
        log.error("%s the engine did not confirm an abort within %g s", request_id, abort_timeout_s)
        task.cancel()
    except BatonError as error:  # the request has its own reason to end, which must not be lost for this one
        log.error("%s the engine did not abort: %s", request_id, error.message)
