"""The exception tree of Baton. Engine adapters translate library errors into it; a runtime encodes it for the wire.

Each class defines its `scope` (the request or the whole worker), `retryable` (another worker may succeed) and the HTTP
`status` that a client receives. Only the worker process may exit, and only for scope "worker".
"""

from typing import ClassVar, Literal

Scope = Literal["request", "worker"]


class BatonError(Exception):
    """Base class of all errors. The message is written for clients and operators."""

    code: ClassVar[str] = "internal"
    scope: ClassVar[Scope] = "request"
    retryable: ClassVar[bool] = False
    status: ClassVar[int] = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(BatonError):
    """The request is invalid on every worker. The message names the field."""

    code = "invalid_request"
    status = 400


class ContextTooLong(InvalidRequest):
    """The prompt, or the prompt plus `max_tokens`, exceeds the context length of the model."""

    code = "context_too_long"


class Unsupported(InvalidRequest):
    """The request uses a feature that this engine does not support."""

    code = "unsupported"


class Conflict(InvalidRequest):
    """The request conflicts with the current state and may succeed later. The state is unchanged."""

    code = "conflict"
    status = 409


class Cancelled(BatonError):
    """The client disconnected or cancelled the request."""

    code = "cancelled"
    status = 499


class DeadlineExceeded(BatonError):
    """The request exceeded its deadline."""

    code = "deadline_exceeded"
    status = 504


class ReaderStalled(BatonError):
    """The client is connected but has not read its stream within `reader_stall_timeout_s`."""

    code = "reader_stalled"
    status = 408


class Overloaded(BatonError):
    """The worker is at its limit of concurrent requests, or of the bytes of media that they hold."""

    code = "overloaded"
    status = 503
    retryable = True


class Paused(BatonError):
    """The worker is paused and temporarily accepts no requests."""

    code = "paused"
    status = 503
    retryable = True


class Draining(BatonError):
    """The worker is shutting down and accepts no requests."""

    code = "draining"
    status = 503
    retryable = True


class PeerLost(BatonError):
    """Another worker that holds data for this request (KV, encoded media) is gone or has lost it."""

    code = "peer_lost"
    status = 503
    retryable = True


class EngineFailed(BatonError):
    """The engine failed this request and serves others, or died with this request alone in it. It does not move."""

    code = "engine_failed"
    status = 500


class EngineStalled(BatonError):
    """The engine has work and makes no progress. The worker deregisters and restarts."""

    code = "engine_stalled"
    scope = "worker"
    status = 503
    retryable = True


class EngineDead(BatonError):
    """The engine can no longer serve. The worker deregisters and restarts."""

    code = "engine_dead"
    scope = "worker"
    status = 503
    retryable = True


class ConfigError(BatonError):
    """A setting, a file or the model is wrong. The command prints the message and exits with code 2."""

    code = "config"
    scope = "worker"
