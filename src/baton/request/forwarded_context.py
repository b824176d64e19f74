"""The Context of a request that this process sends on to other workers."""

from collections.abc import Callable

from baton.ports.runtime import Context
from baton.request.cancel_scope import CancelScope


class ForwardedContext:
    """The caller's id and trace, cancelled with the request's cancel scope (see `Context`)."""

    def __init__(self, context: Context, scope: CancelScope) -> None:
        self._scope = scope
        self.id = context.id
        self.trace_headers = context.trace_headers

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """See `Context.on_cancel`."""
        self._scope.on_fire(lambda _: callback())
