"""Bodies of the system server's replies that are not in `protocol/commands.py`."""

from typing import Literal

import msgspec

State = Literal["starting", "serving", "paused", "unhealthy", "draining"]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/health`. `ready`: discovery has the worker, so frontends send it requests.

    State "paused": an operator has paused the worker or released its memory. State "unhealthy": its canary fails.
    """

    ready: bool
    state: State
    in_flight: int = 0
    model: str | None = None
    role: str | None = None
    engine: str | None = None


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error: a code for programs, a message for people, and the field of the body at fault."""

    code: str
    message: str
    field: str | None = None


class ProblemReply(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every reply that is not a success."""

    error: Problem
