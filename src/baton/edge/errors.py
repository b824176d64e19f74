"""Errors as clients get them: OpenAI's envelope on every route, Anthropic's on its own.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from typing import Literal

import msgspec

from baton.edge.messages import Answer
from baton.errors import BatonError, InvalidRequest

Style = Literal["openai", "anthropic"]

_OPENAI_TYPES = {403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class FieldError(InvalidRequest):
    """A field of a request is invalid or not supported; `param` is its name, as OpenAI's errors have it."""

    def __init__(self, param: str | None, message: str, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.field_code = code
        self.field_status = status


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One error on its way to a client."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()


class ProblemError(BatonError):
    """A problem that ends a request."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def problem_of(error: BatonError) -> Problem:
    """Return `error` as a problem."""
    if isinstance(error, ProblemError):
        return error.problem
    if isinstance(error, FieldError):
        return Problem(status=error.field_status, message=error.message, code=error.field_code, param=error.param)
    return Problem(status=error.status, message=error.message, code=error.code)


def error_type(status: int, style: Style = "openai") -> str:
    """Return the `type` of an error of this status."""
    if style == "anthropic":
        return _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_body(problem: Problem, style: Style, request_id: str) -> bytes:
    """Return the JSON of `problem`."""
    kind = error_type(problem.status, style)
    if style == "anthropic":
        error = {"type": kind, "message": problem.message}
        return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})
    return msgspec.json.encode(
        {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}
    )


def error_answer(problem: Problem, style: Style, request_id: str) -> Answer:
    """Return the answer for `problem`."""
    headers = problem.headers
    if problem.retry_after_s is not None:
        headers = (*headers, (b"retry-after", b"%d" % problem.retry_after_s))
    return Answer(status=problem.status, body=error_body(problem, style, request_id), headers=headers)
