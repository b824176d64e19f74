"""The request that a task works on, for the lines that it logs."""

from collections.abc import Mapping
from contextvars import ContextVar

_NO_HEADERS: Mapping[str, str] = {}


class LogIds:
    """The ids of one request while it runs. Tasks that it leaves behind, as of a kept connection, log without them."""

    __slots__ = ("request_id", "trace_headers")

    def __init__(self, request_id: str, trace_headers: Mapping[str, str]) -> None:
        self.request_id = request_id
        self.trace_headers = trace_headers

    @property
    def trace_id(self) -> str | None:
        """The trace of the request, if there is one."""
        parts = self.trace_headers.get("traceparent", "").split("-")
        return parts[1] if len(parts) == 4 else None

    def end(self) -> None:
        """The request has ended."""
        self.request_id = ""
        self.trace_headers = _NO_HEADERS


CURRENT: ContextVar[LogIds | None] = ContextVar("baton_request", default=None)
