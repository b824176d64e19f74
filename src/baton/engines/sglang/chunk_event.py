"""Chunks of a request, delivered as SGLang's receiving loop adds them: no task wakes for a token but the handler's.

SGLang appends a chunk to the state of its request and sets the state's event, for which the request's generator waits:
a task to wake, two generators to resume and a chunk to merge for each token. `ChunkEvent` replaces that event once the
request has output. The last chunk still goes through the generator, which cleans up after the request.
"""

import asyncio
from collections.abc import Callable

from baton.engines.sglang.sglang_types import Chunk, RequestState


class ChunkEvent:
    """The event of one request. `deliver` is called on the event loop with each chunk but the last.

    A chunk that `deliver` raises for is left to the generator, as are all that follow: the reader raises there.
    """

    __slots__ = ("_deliver", "_event", "_state", "_suspended")

    def __init__(self, state: RequestState, deliver: Callable[[Chunk], None]) -> None:
        self._state = state
        self._deliver = deliver
        self._event = asyncio.Event()
        self._suspended = False

    def set(self) -> None:
        """Deliver what has been added, or wake the generator for the end."""
        state = self._state
        if self._suspended or state.finished:
            self._event.set()
            return
        chunks, state.out_list = state.out_list, []
        for index, chunk in enumerate(chunks):
            try:
                self._deliver(chunk)
            except Exception:  # noqa: BLE001 - SGLang's receiving loop must not end; the reader raises it again
                self._suspended = True
                state.out_list = chunks[index:]
                self._event.set()
                return

    def clear(self) -> None:
        """The generator has taken what there was."""
        self._event.clear()

    async def wait(self) -> None:
        """Wait for what the generator has to handle."""
        await self._event.wait()


def deliver_directly(state: RequestState | None, deliver: Callable[[Chunk], None]) -> None:
    """Deliver the chunks of an unfinished request, those that wait first, by `deliver`."""
    if state is None or state.finished:
        return
    event = state.event = ChunkEvent(state, deliver)
    if state.out_list:
        event.set()
