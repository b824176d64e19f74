"""The one exception tree. Adapters translate into it at the call; a runtime turns it into its own words at the edge.

Each error says whom it harms (`scope`), whether another worker could do better (`retryable`) and the HTTP status
that a client sees. Only `worker.py` may end the process, and only for scope "worker".
"""

from typing import ClassVar, Literal

Scope = Literal["request", "worker"]


class BatonError(Exception):
    """Anything that Baton raises on purpose. The message is written for the person who will read it."""

    code: ClassVar[str] = "internal"
    scope: ClassVar[Scope] = "request"
    retryable: ClassVar[bool] = False
    status: ClassVar[int] = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(BatonError):
    """The request is wrong and will be wrong everywhere; the message names the field."""

    code = "invalid_request"
    status = 400


class ContextTooLong(InvalidRequest):
    """The prompt, or the prompt with the tokens asked for, is longer than the model's context."""

    code = "context_too_long"


class Unsupported(InvalidRequest):
    """The request asks for something that this engine cannot do."""

    code = "unsupported"


class Conflict(InvalidRequest):
    """What is asked contradicts what holds now, and can be right later; nothing has changed."""

    code = "conflict"
    status = 409


class Cancelled(BatonError):
    """The client left or asked to stop."""

    code = "cancelled"
    status = 499


class DeadlineExceeded(BatonError):
    """The request ran longer than its deadline."""

    code = "deadline_exceeded"
    status = 503


class ReaderStalled(BatonError):
    """The client is connected but has not read for too long."""

    code = "reader_stalled"
    status = 408


class Overloaded(BatonError):
    """This worker has as many requests as it accepts."""

    code = "overloaded"
    status = 503
    retryable = True


class Paused(BatonError):
    """This worker does not accept requests for now, and will again."""

    code = "paused"
    status = 503
    retryable = True


class Draining(BatonError):
    """This worker is leaving; the request belongs to another."""

    code = "draining"
    status = 503
    retryable = True


class PeerLost(BatonError):
    """A worker that this request depends on is gone, or has lost what it held for it."""

    code = "peer_lost"
    status = 503
    retryable = True


class EngineFailed(BatonError):
    """The engine failed this one request and goes on serving others."""

    code = "engine_failed"
    status = 500


class EngineStalled(BatonError):
    """The engine has work and makes no progress; the worker leaves and restarts."""

    code = "engine_stalled"
    scope = "worker"
    status = 503
    retryable = True


class EngineDead(BatonError):
    """The engine cannot serve any more; the worker leaves and restarts."""

    code = "engine_dead"
    scope = "worker"
    status = 503
    retryable = True


class ConfigError(BatonError):
    """Something the person who started Baton must change. The command prints the message and exits with 2."""

    code = "config"
    scope = "worker"
