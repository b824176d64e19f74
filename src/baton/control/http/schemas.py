"""What the answers of the system server look like, beside those of `protocol/control.py`."""

from typing import Literal

import msgspec

State = Literal["starting", "serving", "paused", "unhealthy", "draining"]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What `/health` tells. `ready` is whether frontends send requests here.

    One that is paused is so by order; one that is ill does not answer its canary.
    """

    ready: bool
    state: State
    in_flight: int = 0
    model: str | None = None
    role: str | None = None
    engine: str | None = None


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went wrong: a code to compare, a message to read, and the field of the body that it is about."""

    code: str
    message: str
    field: str | None = None


class ProblemReply(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is not a success."""

    error: Problem
