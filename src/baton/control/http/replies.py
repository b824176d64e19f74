"""Replies of the system server: structs as JSON, and errors by one table.

error           status
BadBody         422, with the field
Unsupported     501
all others      the error's own: 400, 409, 500, 503
"""

import logging
import re
from typing import NamedTuple

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from baton.control.http.schemas import Problem, ProblemReply
from baton.errors import BatonError, InvalidRequest, Unsupported

log = logging.getLogger(__name__)

OK = "ok"


class BadBody(InvalidRequest):
    """The body does not fit the command; `field` is the field at fault, None for the whole body."""

    status = 422

    def __init__(self, message: str, field: str | None) -> None:
        super().__init__(message)
        self.field = field


class Reply(NamedTuple):
    """A response with its outcome, "ok" or the code of an error, and the error's message."""

    response: web.StreamResponse
    outcome: str
    message: str


async def reply_of(request: web.Request, handler: Handler) -> Reply:
    """Return the response of `handler` to `request`, or that of the error that it raises."""
    try:
        return Reply(await handler(request), OK, "")
    except BatonError as error:
        return Reply(reply_to_error(error), error.code, error.message)
    except web.HTTPException as error:
        return _aiohttp_reply(request, error)
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return Reply(error_reply(500, "internal", "internal error"), "internal", "internal error")


def json_reply(value: msgspec.Struct, status: int = 200) -> web.Response:
    """Return a response with `value` as JSON."""
    body = msgspec.json.encode(value, order="deterministic")
    return web.Response(body=body, status=status, content_type="application/json")


def error_reply(status: int, code: str, message: str, field: str | None = None) -> web.Response:
    """Return a response with an error."""
    return json_reply(ProblemReply(error=Problem(code=code, message=message, field=field)), status)


def reply_to_error(error: BatonError) -> web.Response:
    """Return the response for `error`."""
    status = 501 if isinstance(error, Unsupported) else error.status
    return error_reply(status, error.code, error.message, error.field if isinstance(error, BadBody) else None)


def _aiohttp_reply(request: web.Request, error: web.HTTPException) -> Reply:
    """Return aiohttp's own error (unknown path, wrong method) in our format, with its headers."""
    code = _reason_code(error.status)
    message = f"{request.method} {request.path}: {error.reason}"
    response = error_reply(error.status, code, message)
    if allowed := error.headers.get("Allow"):
        response.headers["Allow"] = allowed
    return Reply(response, code, message)


def _reason_code(status: int) -> str:
    return {404: "not_found", 405: "method_not_allowed"}.get(status, "bad_request" if status < 500 else "internal")


def field_of(problem: str) -> str | None:
    """Return the path of the field in a validation error of msgspec, such as `source.path`."""
    what, _, place = problem.partition(" - at `$")
    named = re.search(r"(?:unknown|missing required) field `([^`]+)`", what)
    path = place.rstrip("`").lstrip(".")
    return ".".join(filter(None, (path, named[1] if named else ""))) or None
