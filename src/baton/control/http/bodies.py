"""From the body of an order to its verb: strict, and with a limit to its size."""

import msgspec
from aiohttp import web

from baton.control.http.command_table import Route
from baton.control.http.replies import BadBody, field_of
from baton.errors import InvalidRequest
from baton.protocol.commands import Command


class TooLarge(InvalidRequest):
    """The body of an order is larger than its route takes."""

    code = "too_large"
    status = 413


async def read_verb(request: web.Request, route: Route, kind: type[Command]) -> Command:
    """Return the verb that the body of `request` describes; no body at all is an empty one.

    Raises TooLarge, InvalidRequest (not JSON) or BadBody (not this verb).
    """
    body = await _read(request, route.body_bytes)
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise BadBody(f"{route.path}: {error}", field_of(str(error))) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"{route.path}: {error}") from None


async def _read(request: web.Request, limit: int) -> bytearray:
    too_large = TooLarge(f"a body here may have {limit} bytes")
    if (request.content_length or 0) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise too_large
    return body
