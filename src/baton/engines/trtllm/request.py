"""One request inside the engine, from the call to its last result. One task reads its results, and nobody else does.

waiting for KV ──first result──► running ──last result──► ended
       │                            │
       └── abort: told with the     └── abort: told at once
           first result

A request that goes on from KV of elsewhere cannot be aborted while that KV is on its way: the engine would lose what it
has set aside for it. So its reader tells the engine, as soon as the first result shows that the KV has come.
"""

import asyncio
import logging
from collections.abc import Callable

from baton.engine_kit.output_stream import OutputStream
from baton.engines.trtllm.library_types import Result
from baton.engines.trtllm.outputs import ResultReader
from baton.errors import BatonError, EngineFailed, PeerLost
from baton.ports.engine import Work
from baton.protocol.handoff import Consume

log = logging.getLogger(__name__)


class RunningRequest:
    """A request that the engine has. It ends with its task, whoever has given it up before."""

    def __init__(
        self,
        work: Work,
        result: Result,
        reader: ResultReader,
        stream: OutputStream,
        translate: Callable[[Exception], BatonError],
    ) -> None:
        self.work = work
        self.result = result
        self.stream = stream
        self.steps = 0
        self._reader = reader
        self._translate = translate
        self.given_up = False
        self._abort_told = False
        self.task = asyncio.create_task(self._read(), name=f"trtllm {work.request_id}")

    @property
    def running(self) -> bool:
        """Whether the engine has begun with it."""
        return self.steps > 0

    def give_up(self, error: BatonError) -> None:
        """End the stream, and the request as soon as the engine can."""
        self.stream.fail(error)
        self.given_up = True
        if self.running or not isinstance(self.work.handoff, Consume):
            self._tell_abort()

    async def _read(self) -> None:
        try:
            async for result in self.result:
                self.steps += 1
                if self.given_up:
                    self._tell_abort()
                else:
                    self._tell_stream(result)
        except Exception as error:  # noqa: BLE001 - the engine's, and translated
            self.stream.fail(self._failure(error))
        finally:
            self.stream.fail(EngineFailed("the engine ended the request without a last result"))

    def _failure(self, error: Exception) -> BatonError:
        """Before the first result, what goes wrong with KV from elsewhere is most likely that it did not come."""
        failure = self._translate(error)
        if isinstance(failure, EngineFailed) and isinstance(self.work.handoff, Consume) and not self.running:
            return PeerLost(f"the KV of the prefill did not come: {failure.message}")
        return failure

    def _tell_stream(self, result: Result) -> None:
        """A result that cannot be read harms this request and no other."""
        try:
            self._reader.take(result)
        except BatonError as error:
            self.give_up(error)
        except Exception as error:
            log.exception("%s a result cannot be read", self.work.request_id)
            self.give_up(EngineFailed(f"a result of the engine cannot be read: {error!r}"))

    def _tell_abort(self) -> None:
        if self._abort_told or self.task.done():
            return
        self._abort_told = True
        try:
            self.result.abort()
        except Exception as error:  # noqa: BLE001 - an engine that is gone has nothing to end
            log.warning("%s cannot be aborted: %r", self.work.request_id, error)
