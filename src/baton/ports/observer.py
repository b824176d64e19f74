"""The observer: gets one record of each request at its end."""

from typing import Protocol

import msgspec

from baton.protocol.ids import RequestId
from baton.protocol.lifecycle import State


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One finished request. `model` is the name in the request; "" if it has none.

    `queue_s` is how long it waited in the engine for its first step, and `prefill_s` the time from there to its first
    output; None where the engine does not say.
    """

    request_id: RequestId
    role: str
    state: State
    error_code: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_output_s: float | None
    duration_s: float
    model: str
    trace_id: str | None
    client_id: str | None = None
    queue_s: float | None = None
    prefill_s: float | None = None


class Observer(Protocol):
    """Called in the event loop, once per request; must not block or raise."""

    def finished(self, record: RequestRecord) -> None:
        """A request has ended."""
