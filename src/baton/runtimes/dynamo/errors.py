"""Our errors in the runtime's words and back, by table. The runtime's words decide status, migration and routing.

raised at the worker                             the frontend
InvalidArgument                                  answers 400 with the message
Disconnected                                     sends the request to another worker, then 503
EngineShutdown                                   the same, and leaves this worker alone for some seconds
HttpError(n)                                     answers n; with 408 and 504 it leaves this worker alone too
Cancelled / Unknown                              answers 499 / 500
"""

import asyncio
import logging
from collections.abc import Callable

from dynamo import _core
from dynamo.llm.exceptions import HttpError

from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Draining,
    EngineDead,
    EngineFailed,
    EngineStalled,
    InvalidRequest,
    Overloaded,
    Paused,
    PeerLost,
    ReaderStalled,
)

log = logging.getLogger(__name__)

_OUTWARD: dict[type[BatonError], Callable[[str], Exception]] = {
    InvalidRequest: _core.InvalidArgument,
    Cancelled: _core.Cancelled,
    ReaderStalled: _core.Cancelled,
    # Not 504 or 408: the frontend would send this worker nothing at all for 5 s.
    DeadlineExceeded: lambda message: HttpError(503, message),
    Overloaded: _core.Disconnected,
    Paused: _core.Disconnected,
    PeerLost: _core.Disconnected,
    Draining: _core.EngineShutdown,
    EngineStalled: _core.EngineShutdown,
    EngineDead: _core.EngineShutdown,
    EngineFailed: _core.Unknown,
    BatonError: _core.Unknown,
}

_INWARD: tuple[tuple[type[Exception], type[BatonError]], ...] = (
    (_core.InvalidArgument, InvalidRequest),
    (_core.Cancelled, Cancelled),
    (_core.ConnectionTimeout, DeadlineExceeded),
    (_core.EngineShutdown, Draining),
    (_core.WorkerUnavailable, PeerLost),
    (_core.Disconnected, PeerLost),
    (_core.CannotConnect, PeerLost),
    (_core.StreamIncomplete, PeerLost),
)


def to_runtime(error: BaseException) -> Exception:
    """Return what to raise into the runtime for `error`. What is not ours is a bug: it is logged, and hidden."""
    if isinstance(error, BatonError):
        for cls in type(error).__mro__:
            if cls in _OUTWARD:
                return _OUTWARD[cls](error.message)
    if isinstance(error, asyncio.CancelledError):
        return _core.Cancelled("cancelled")
    log.error("unexpected error in a handler", exc_info=error)
    return _core.Unknown("internal error")


def from_runtime(error: Exception) -> BatonError:
    """Return `error`, raised by a call to another worker, as one of ours."""
    for theirs, ours in _INWARD:
        if isinstance(error, theirs):
            return ours(str(error))
    return EngineFailed(str(error))
