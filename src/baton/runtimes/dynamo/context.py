"""The runtime's request context, as our Context."""

import asyncio
from collections.abc import Callable, Mapping

from dynamo._core import Context as RawContext

_NAMES = ("traceparent", "tracestate", "x-request-id", "request-id")


class DynamoContext:
    """See `ports/runtime.py`. `raw` is the runtime's own context."""

    __slots__ = ("_cancelled", "_headers", "raw")

    def __init__(self, raw: RawContext) -> None:
        self.raw = raw
        self._headers: dict[str, str] | None = None
        self._cancelled: asyncio.Future[bool] | None = None

    @property
    def id(self) -> str:
        """See `Context.id`."""
        return self.raw.id()

    @property
    def trace_headers(self) -> Mapping[str, str]:
        """See `Context.trace_headers`."""
        if self._headers is None:
            # The runtime makes parents that nothing exports, and a new trace for each call between workers. What the
            # edge and other workers send is in the metadata, and wins.
            sent = self.raw.metadata.copy()
            self._headers = {
                **(self.raw.trace_headers() or {}),
                **{name: sent[name] for name in _NAMES if name in sent},
            }
        return self._headers

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """See `Context.on_cancel`."""
        if self._cancelled is None:
            self._cancelled = self.raw.async_killed_or_stopped()
        self._cancelled.add_done_callback(lambda future: None if future.cancelled() else callback())

    def close(self) -> None:
        """The request has ended: no callback is called any more."""
        if self._cancelled is not None:
            self._cancelled.cancel()
