"""The requests inside SGLang: one reader task for each choice, and an abort that reaches every one of them.

A reader handles the first and the last chunk; those between are delivered by SGLang's receiving loop itself.

SGLang aborts every request whose id *begins* with the given one, so ids begin with a number of fixed length: aborting
"a.1" must not abort "a.10".
"""

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from baton.engine_kit.output_stream import OutputStream
from baton.engines.sglang.chunk_event import deliver_directly
from baton.engines.sglang.media import media_fields
from baton.engines.sglang.outputs import Choice, ChoiceUpdate
from baton.engines.sglang.params import Setting, request_fields
from baton.engines.sglang.sglang_types import Chunk, Manager
from baton.errors import BatonError, Cancelled, EngineFailed, InvalidRequest
from baton.ports.engine import Work
from baton.protocol.ids import RequestId
from baton.protocol.outputs import Finished

HELD_ABORT_S = 1.0

log = logging.getLogger(__name__)


class _Request:
    """One request: its stream, and the readers of its unfinished choices by SGLang's request ids."""

    __slots__ = ("begun", "readers", "stream", "work")

    def __init__(self, work: Work) -> None:
        self.work = work
        self.stream = OutputStream(work.sampling.n or 1)
        self.readers: dict[str, asyncio.Task[None]] = {}
        self.begun = False


class Requests:
    """The unfinished requests. Event-loop thread only.

    `held` is true while generation is paused: SGLang then keeps even aborted requests. Requests that SGLang ends on its
    own fail with `because`, if it is set.
    """

    def __init__(self, manager: Manager, make: Callable[..., Any], setting: Setting, incremental: bool = True) -> None:
        self.steps = 0
        self.held = False
        self.because: BatonError | None = None
        self._manager = manager
        self._make = make
        self._setting = setting
        self._incremental = incremental
        self._open: dict[RequestId, _Request] = {}
        self._numbers = itertools.count(1)
        self._warned_of_priority = False

    @property
    def running(self) -> int:
        """Requests that have output."""
        return sum(request.begun for request in self._open.values())

    @property
    def waiting(self) -> int:
        """Requests without output."""
        return len(self._open) - self.running

    def submit(self, work: Work) -> OutputStream:
        """See `GenerateEngine.submit`."""
        if work.request_id in self._open:
            raise InvalidRequest(f"request id {work.request_id} is in use")
        if work.lora_name is not None and work.lora_name not in self._manager.lora_ref_cache:
            raise InvalidRequest(f"lora_name: {work.lora_name!r} is not loaded")
        if work.priority and self._setting.default_priority is None:
            self._warn_of_priority(work)
        choices = [self._fields(work, index) for index in range(work.sampling.n or 1)]
        media = media_fields(work.media)
        request = self._open[work.request_id] = _Request(work)
        for index, fields in enumerate(choices):
            reading = asyncio.create_task(self._read(request, index, fields | media), name=f"sglang-{fields['rid']}")
            request.readers[fields["rid"]] = reading
            reading.add_done_callback(functools.partial(self._reader_done, request, fields["rid"]))
        return request.stream

    async def abort(self, request_id: RequestId) -> None:
        """See `AbortableEngine.abort`."""
        request = self._open.get(request_id)
        if request is None:
            return
        request.stream.fail(Cancelled("aborted"))
        unfinished = set(self._abort_choices(request))
        while unfinished:
            _, unfinished = await asyncio.wait(unfinished, timeout=HELD_ABORT_S)
            # A held request ends when generation continues; until then nothing touches its memory. A pause can begin
            # during the wait.
            if self.held:
                return

    def end_early(self, because: BatonError) -> int:
        """End every request with `because`; return their number."""
        requests = tuple(self._open.values())
        for request in requests:
            request.stream.fail(because)
            self._abort_choices(request)
        return len(requests)

    def abandon(self, because: BatonError) -> list[asyncio.Task[None]]:
        """End every stream with `because` and cancel the readers; return them."""
        readers = [reader for request in self._open.values() for reader in request.readers.values()]
        for request in self._open.values():
            request.stream.fail(because)
        for reader in readers:
            reader.cancel()
        return readers

    async def close(self, because: BatonError) -> None:
        """End every stream with `because`; return when every reader has ended."""
        if readers := self.abandon(because):
            await asyncio.wait(readers)

    def _warn_of_priority(self, work: Work) -> None:
        """Warn once. A priority is no reason to refuse a request: a global router selects pools by it."""
        if not self._warned_of_priority:
            self._warned_of_priority = True
            log.warning(
                "%s has priority %d, and this engine does not schedule by priority; to turn that on, add"
                " --enable-priority-scheduling to the engine's arguments",
                work.request_id,
                work.priority,
            )

    def _fields(self, work: Work, index: int) -> dict[str, Any]:
        return request_fields(work, f"{next(self._numbers):012x}-{work.request_id}", index, self._setting)

    def _abort_choices(self, request: _Request) -> list[asyncio.Task[None]]:
        """Abort every choice at SGLang; return the readers, which end with it."""
        for rid, reader in tuple(request.readers.items()):
            state = self._manager.rid_to_state.get(rid)
            if state is not None and state.dispatched:
                self._manager.abort_request(rid=rid)
            else:
                # SGLang drops an abort that arrives before its request.
                reader.cancel()
        return list(request.readers.values())

    def _reader_done(self, request: _Request, rid: str, _: asyncio.Task[None]) -> None:
        del request.readers[rid]
        if not request.readers and self._open.get(request.work.request_id) is request:
            del self._open[request.work.request_id]
            request.stream.fail(EngineFailed("SGLang ended the request without a reason"))

    async def _read(self, request: _Request, index: int, fields: dict[str, Any]) -> None:
        choice, rid = Choice(request.work, index, self._incremental), fields["rid"]

        def deliver(chunk: Chunk) -> None:
            update = choice.read(chunk)
            self.steps += 1
            self._deliver(request, rid, index, update)

        try:
            async with aclosing(self._manager.generate_request(self._make(**fields), None)) as chunks:
                async for chunk in chunks:
                    deliver(chunk)
                    deliver_directly(self._manager.rid_to_state.get(rid), deliver)
        except BatonError as error:
            self._fail(request, error)
        except ValueError as error:
            self._fail(request, InvalidRequest(str(error)))
        except Exception as error:
            log.warning("%s failed inside SGLang", request.work.request_id, exc_info=True)
            self._fail(request, EngineFailed(f"SGLang failed: {error!r}"))

    def _deliver(self, request: _Request, rid: str, index: int, update: ChoiceUpdate) -> None:
        stream = request.stream
        if update.token_ids:
            if not request.begun:
                self._begin(stream, update)
            request.begun = True
            if update.prompt_logprobs is not None:
                stream.scored(update.prompt_logprobs)
            stream.push(update.token_ids, index, update.logprobs)
        if isinstance(end := update.end, Finished):
            stream.finish(end.reason, index, end.stop_reason, end.cached_tokens)
            if update.cut:
                self._manager.abort_request(rid=rid)
        elif end is not None:
            self._fail(request, self.because if isinstance(end, Cancelled) and self.because is not None else end)

    def _begin(self, stream: OutputStream, update: ChoiceUpdate) -> None:
        """Add what the first tokens come with."""
        if update.cached_tokens is not None:
            stream.cached(update.cached_tokens)
        for progress in update.progress:
            stream.progressed(progress)

    def _fail(self, request: _Request, error: BatonError) -> None:
        """Fail the request, because one of its choices failed."""
        request.stream.fail(error)
        if len(request.readers) > 1:
            self._abort_choices(request)
