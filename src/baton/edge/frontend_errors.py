"""Errors of the frontend, read from its answers and from events in its streams, as problems for clients."""

import msgspec

from baton.edge.errors import Problem, Style, error_body
from baton.edge.routes import Json

_ERROR_MARKS = (b'data: {"error"', b"event: error", b'data: {"type":"error"')


def problem_from_frontend(status: int, body: bytes) -> Problem:
    """Return the problem in an answer of the frontend that is not a success."""
    return _problem(status, _message(body))


def has_error_event(data: bytes) -> bool:
    """Whether some event in `data` may be an error. Quotes within strings are escaped, so text cannot look like one."""
    return any(mark in data for mark in _ERROR_MARKS)


def rewrite_error_events(data: bytes, style: Style, request_id: str) -> bytes:
    """Return whole events with those that are errors in the format of `style`."""
    return b"\n\n".join(_rewritten(event, style, request_id) for event in data.split(b"\n\n"))


def _rewritten(event: bytes, style: Style, request_id: str) -> bytes:
    if not has_error_event(event):
        return event
    text = b"".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
    content = _object(text)
    error = content.get("error", content)
    if not isinstance(error, dict):
        error = {"message": error} if isinstance(error, str) else {}
    code = error.get("code")
    status = code if isinstance(code, int) else 500
    problem = _problem(status, str(error.get("message") or ""))
    name = b"event: error\n" if style == "anthropic" else b""
    return name + b"data: " + error_body(problem, style, request_id)


def _problem(status: int, message: str) -> Problem:
    return Problem(
        status=status,
        message=message or f"the frontend answered {status}",
        code=None,
        retry_after_s=1 if status == 503 else None,
    )


def _message(body: bytes) -> str:
    content = _object(body)
    error = content.get("error")
    inner = error if isinstance(error, dict) else content
    message = inner.get("message") or (error if isinstance(error, str) else None)
    if message is None and not content:
        return body.decode(errors="replace").strip()
    return str(message or "")


def _object(text: bytes) -> Json:
    try:
        return msgspec.json.decode(text, type=Json)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return {}
