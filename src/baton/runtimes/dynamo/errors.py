"""Translates our errors to the runtime's and back, by table. The runtime's decide status, migration and routing.

    raised in the worker        the frontend
    InvalidArgument             replies 400 with the message
    Disconnected                sends the request to another worker, at last 503
    EngineShutdown              the same, and sends this worker nothing for some seconds
    HttpError(n)                replies n, without the message
    Cancelled / Unknown         replies 499 / 500, without the message

A caller that is a worker itself gets the kind and the message as text. Messages that no client reads begin with our
error code, so that the caller can restore the error.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator

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
    Cancelled: _core.Cancelled,
    ReaderStalled: _core.Cancelled,
    # Not 504: the frontend would then send this worker nothing for some seconds.
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

# Raised in this process, before a call reaches another one.
_BY_CLASS: dict[type[Exception], type[BatonError]] = {
    _core.InvalidArgument: InvalidRequest,
    _core.RouterQueueLimitExceeded: Overloaded,  # type: ignore[attr-defined]  # not in its stub
    _core.CannotConnect: PeerLost,
    _core.ConnectionTimeout: PeerLost,
    _core.Disconnected: PeerLost,
    _core.StreamIncomplete: PeerLost,
    _core.WorkerUnavailable: PeerLost,
}

_BY_KIND: dict[str, type[BatonError]] = {
    "InvalidRequest": InvalidRequest,
    "Cancelled": Cancelled,
    "DeadlineExceeded": PeerLost,  # of the runtime: a worker, frozen perhaps, has not taken a request; ours have a code
    "RateLimited": Overloaded,
    "Unavailable": PeerLost,
}


def to_runtime(error: BaseException) -> Exception:
    """Return the runtime's error for `error`. One that is not ours is a bug: it is logged, and its text not sent."""
    if isinstance(error, InvalidRequest):
        return _core.InvalidArgument(error.message)
    if isinstance(error, BatonError):
        for cls in type(error).__mro__:
            if cls in _OUTWARD:
                return _OUTWARD[cls](f"{error.code}: {error.message}")
    if isinstance(error, asyncio.CancelledError):
        return _core.Cancelled("cancelled: cancelled")
    log.error("unexpected error in a handler", exc_info=error)
    return _core.Unknown("internal: internal error")


def from_runtime(error: Exception) -> BatonError:
    """Return our error for `error`, which a call to another worker raised."""
    if (meaning := _BY_CLASS.get(type(error))) is not None:
        return meaning(str(error))
    kind, _, text = str(error).partition(": ")
    if text.startswith("{"):
        text = _message_of(text)
    code, _, message = text.partition(": ")
    known = _BY_CODE.get(code)
    return known(message) if known is not None else _BY_KIND.get(kind, EngineFailed)(text or kind)


def _message_of(text: str) -> str:
    try:
        body = json.loads(text)
    except ValueError:
        return text
    return str(body.get("message", text)) if isinstance(body, dict) else text


def _all_errors(cls: type[BatonError] = BatonError) -> Iterator[type[BatonError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _all_errors(child)


# Of several with one code the most general: the others belong to one module each.
_BY_CODE = {cls.code: cls for cls in reversed(tuple(_all_errors()))}
