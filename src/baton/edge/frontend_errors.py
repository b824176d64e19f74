"""Errors of the frontend, read from its answers and from events in its streams, as problems for clients.

The frontend replaces most messages by a fixed text; the reason comes from its log. A reason that a worker gave begins
with the code of one of our errors, which has its own status. Other reasons of a 5xx are not for clients.
"""

import re
from collections.abc import Iterator

import msgspec

from baton.edge.errors import Problem, Style, error_body
from baton.edge.routes import Json
from baton.errors import BatonError

RETRY_AFTER_S = 1
_FIXED_TEXTS = frozenset(("", "Invalid request", "Bad Request"))
_FIELD = re.compile(r"([a-z_][a-zA-Z0-9_.\[\]]*): ")
_UNSUPPORTED = re.compile(r"parameter\(s\): `([^`]+)`")
_CODES = {500: "internal", 503: "service_unavailable", 504: "deadline_exceeded", 529: "overloaded"}
_WITH_RETRY = (429, 503, 529)
_PROMPT_FIELDS = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
    "/v1/messages": "messages",
}


def _all_errors(cls: type[BatonError] = BatonError) -> Iterator[type[BatonError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _all_errors(child)


# Of several with one code the most general: the others belong to one module each.
_STATUS_BY_CODE = {cls.code: cls.status for cls in reversed(tuple(_all_errors()))}


def problem_from_frontend(path: str, status: int, body: bytes, reason: str | None) -> Problem:
    """Return the problem in an answer of the frontend on the route `path` that is not a success."""
    return _with_public_field(_problem(status, _message(body), reason), path)


def has_error_event(data: bytes) -> bool:
    """Whether some whole event in `data` is an error.

    Quotes and line ends within strings are escaped, so text cannot look like one.
    """
    return (
        b'data: {"error"' in data
        or b'data: {"type":"error"' in data
        or b"\nevent: error" in data
        or data.startswith(b"event: error")
    )


def rewrite_error_events(data: bytes, style: Style, request_id: str, reason: str | None) -> bytes:
    """Return whole events with those that are errors in the format of `style`."""
    return b"\n\n".join(_rewritten(event, style, request_id, reason) for event in data.split(b"\n\n"))


def _rewritten(event: bytes, style: Style, request_id: str, reason: str | None) -> bytes:
    if not has_error_event(event):
        return event
    content = _object(b"".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")))
    inner = content.get("error")
    code = inner.get("code") if isinstance(inner, dict) else content.get("code")
    problem = _problem(code if isinstance(code, int) else 500, _message_of(content), reason)
    name = b"event: error\n" if event.startswith(b"event:") or style == "anthropic" else b""
    return name + b"data: " + error_body(problem, style, request_id)


def _problem(status: int, message: str, reason: str | None) -> Problem:
    code, _, text = (reason or "").partition(": ")
    if code in _STATUS_BY_CODE:
        status, message = _STATUS_BY_CODE[code], text
    else:
        code = ""
        if status == 400 and reason and message in _FIXED_TEXTS:
            message = reason
    message = message.removeprefix("Validation: ")
    return Problem(
        status=status,
        message=message or f"the request has failed with status {status}",
        code=code or _code(status, message),
        param=_param(message) if status == 400 else None,
        retry_after_s=RETRY_AFTER_S if status in _WITH_RETRY else None,
    )


def _with_public_field(problem: Problem, path: str) -> Problem:
    """Return the problem with the client's name of the field that a worker names."""
    field = problem.param or ""
    prompt = _PROMPT_FIELDS.get(path)
    if prompt is None or not field.startswith("token_ids"):
        return problem
    message = problem.message.replace(f"{field}: ", f"{prompt}: ", 1)
    return msgspec.structs.replace(problem, message=message, param=prompt)


def _code(status: int, message: str) -> str | None:
    return "context_length_exceeded" if "maximum context length" in message else _CODES.get(status)


def _param(message: str) -> str | None:
    """Return the field that a message names: "n: ..." by a worker, "parameter(s): `n`" by the frontend."""
    if (found := _FIELD.match(message) or _UNSUPPORTED.search(message)) is not None:
        return found[1]
    return None


def _message(body: bytes) -> str:
    content = _object(body)
    return _message_of(content) if content else body.decode(errors="replace").strip()


def _message_of(content: Json) -> str:
    error = content.get("error", content)
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""


def _object(text: bytes) -> Json:
    try:
        return msgspec.json.decode(text, type=Json)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return {}
