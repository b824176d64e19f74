"""One request in the engine, from its submission to its last result. Its task is the only reader of its results.

preparing media ──► waiting for KV ──first result──► running ──last result──► ended
       │                   │                            │
       └── abort: it is    └── abort: sent with the     └── abort: sent at once
           not submitted       first result

A request that consumes KV cannot be aborted while the KV is in transfer: the engine would lose the blocks that it has
reserved. The abort is sent when the first result shows that the KV has arrived.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from baton.engine_kit.output_stream import OutputStream
from baton.engines.trtllm.library_types import Result
from baton.engines.trtllm.outputs import ResultReader
from baton.errors import BatonError, EngineFailed, PeerLost
from baton.ports.engine import Work
from baton.protocol.handoff import Consume

log = logging.getLogger(__name__)


class Submitted(NamedTuple):
    """What the library has returned for a request, and what reads it."""

    result: Result
    reader: ResultReader


class RunningRequest:
    """A request that the engine has. It ends with its task, also when it has been aborted.

    `submitted` is None for a request that `prepare` submits; that returns None if the request has been aborted. Until
    `preparing` is set, nothing has been done for it.
    """

    def __init__(
        self,
        work: Work,
        stream: OutputStream,
        translate: Callable[[Exception], BatonError],
        submitted: Submitted | None,
        prepare: Callable[["RunningRequest"], Awaitable[Submitted | None]],
    ) -> None:
        self.work = work
        self.stream = stream
        self.steps = 0
        self.aborted = False
        self.preparing = False
        self._submitted = submitted
        self._prepare = prepare
        self._translate = translate
        self._abort_sent = False
        self.task = asyncio.create_task(self._read(), name=f"trtllm {work.request_id}")

    @property
    def running(self) -> bool:
        """Whether the engine has returned a result."""
        return self.steps > 0

    @property
    def result(self) -> Result | None:
        """The result, once the request has been submitted."""
        return None if self._submitted is None else self._submitted.result

    def abort(self, error: BatonError) -> None:
        """End the stream with `error`, and the request as soon as the engine can."""
        self.stream.fail(error)
        self.aborted = True
        if self._submitted is None:
            if not self.preparing:
                self.task.cancel()
        elif self.running or not isinstance(self.work.handoff, Consume):
            self._send_abort()

    async def _read(self) -> None:
        try:
            self._submitted = self._submitted or await self._prepare(self)
            if self._submitted is not None:
                await self._read_results(*self._submitted)
        except BatonError as error:
            self.stream.fail(error)
        except Exception as error:  # noqa: BLE001 - the engine's, and translated
            self.stream.fail(self._failure(error))
        finally:
            self.stream.fail(EngineFailed("the engine ended the request without a last result"))

    async def _read_results(self, submitted: Result, reader: ResultReader) -> None:
        async for result in submitted:
            self.steps += 1
            if self.aborted:
                self._send_abort()
            else:
                self._push(result, reader)

    def _failure(self, error: Exception) -> BatonError:
        """Before the first result of a request that consumes KV, the likely cause is that the KV did not arrive."""
        failure = self._translate(error)
        if isinstance(failure, EngineFailed) and isinstance(self.work.handoff, Consume) and not self.running:
            return PeerLost(f"the KV of the prefill did not arrive: {failure.message}")
        return failure

    def _push(self, result: Result, reader: ResultReader) -> None:
        """A result that cannot be read fails this request and no other."""
        try:
            reader.push(result)
        except BatonError as error:
            self.abort(error)
        except Exception as error:
            log.exception("%s cannot read a result", self.work.request_id)
            self.abort(EngineFailed(f"a result of the engine cannot be read: {error!r}"))

    def _send_abort(self) -> None:
        result = self.result
        if self._abort_sent or self.task.done() or result is None:
            return
        self._abort_sent = True
        try:
            result.abort()
        except Exception as error:  # noqa: BLE001 - an engine that has ended has nothing to abort
            log.warning("%s cannot be aborted: %r", self.work.request_id, error)
