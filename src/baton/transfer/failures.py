"""Errors across a line: what one side failed with, as the other side raises it."""

from baton.errors import (
    BatonError,
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    PeerLost,
    Unsupported,
)
from baton.transfer.wire import Failed

# Another worker would fail with these too. Anything else is the other worker's trouble, and a reason to try elsewhere.
_SAME_EVERYWHERE = {
    error.code: error
    for error in (InvalidRequest, ContextTooLong, Unsupported, Cancelled, DeadlineExceeded, EngineFailed)
}


def failed(error: BatonError) -> Failed:
    """Return the message that tells the other side of `error`."""
    return Failed(error.code, error.message)


def failure(message: Failed) -> BatonError:
    """Return what the other side failed with, as an error of this worker's request."""
    return _SAME_EVERYWHERE.get(message.code, PeerLost)(message.message)
