"""How the system server answers: structs as JSON, and errors by one table.

our error                            status
a body that does not fit             422, with the field
Unsupported                          501
all others                           the error's own: 400, 409, 500, 503
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
    """The body of an order does not fit; `field` is what of it, or None if it is the whole."""

    status = 422

    def __init__(self, message: str, field: str | None) -> None:
        super().__init__(message)
        self.field = field


class Answered(NamedTuple):
    """An answer with what is to be told of it: "ok" or the code of an error, and its message."""

    response: web.StreamResponse
    outcome: str
    message: str


async def answered(request: web.Request, handler: Handler) -> Answered:
    """Return what `handler` answers to `request`, or what the error that it raises becomes."""
    try:
        return Answered(await handler(request), OK, "")
    except BatonError as error:
        return Answered(refusal_of(error), error.code, error.message)
    except web.HTTPException as error:
        return _by_aiohttp(request, error)
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return Answered(refusal(500, "internal", "internal error"), "internal", "internal error")


def answer(value: msgspec.Struct, status: int = 200) -> web.Response:
    """Return `value` as JSON."""
    body = msgspec.json.encode(value, order="deterministic")
    return web.Response(body=body, status=status, content_type="application/json")


def refusal(status: int, code: str, message: str, field: str | None = None) -> web.Response:
    """Return an answer that says what went wrong."""
    return answer(ProblemReply(error=Problem(code=code, message=message, field=field)), status)


def refusal_of(error: BatonError) -> web.Response:
    """Return what `error` becomes."""
    status = 501 if isinstance(error, Unsupported) else error.status
    return refusal(status, error.code, error.message, error.field if isinstance(error, BadBody) else None)


def _by_aiohttp(request: web.Request, error: web.HTTPException) -> Answered:
    """Return aiohttp's own refusal (no such route, wrong method) in our words, with its headers."""
    code = _reason_code(error.status)
    message = f"{request.method} {request.path}: {error.reason}"
    response = refusal(error.status, code, message)
    if allowed := error.headers.get("Allow"):
        response.headers["Allow"] = allowed
    return Answered(response, code, message)


def _reason_code(status: int) -> str:
    return {404: "not_found", 405: "method_not_allowed"}.get(status, "bad_request" if status < 500 else "internal")


def field_of(problem: str) -> str | None:
    """Return the path of the field that a complaint of msgspec is about, such as `source.path`."""
    what, _, place = problem.partition(" - at `$")
    named = re.search(r"(?:unknown|missing required) field `([^`]+)`", what)
    path = place.rstrip("`").lstrip(".")
    return ".".join(filter(None, (path, named[1] if named else ""))) or None
