"""The Context of a request that this process sends on to other workers."""

from collections.abc import Callable

from baton.ports.runtime import Context
from baton.request.tracker import TrackedRequest


class ForwardedContext:
    """The caller's id, and the trace with this process as parent, cancelled with the request (see `Context`)."""

    def __init__(self, context: Context, tracked: TrackedRequest) -> None:
        self._scope = tracked.scope
        self.id = context.id
        self.trace_headers = tracked.trace_headers

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """See `Context.on_cancel`."""
        self._scope.on_fire(lambda _: callback())
