"""The operator's routes: `/engine/control/<verb>` on the system port, one for each verb, and `status`.

The system server answers 200 to whatever a route returns, and wraps what it raises into a text; so every answer is an
object that says by itself whether it went well, and no route raises.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import get_args

import msgspec

from baton.control.orders import Orders
from baton.errors import BatonError, InvalidRequest
from baton.ports.runtime import Runtime, Wire
from baton.protocol.codec import DecodeError, convert
from baton.protocol.control import Verb

log = logging.getLogger(__name__)

Route = Callable[[Wire], Awaitable[Wire]]


def expose_orders(runtime: Runtime, orders: Orders) -> None:
    """Answer every verb, and `status`, from now on."""

    async def status(_: Wire) -> Wire:
        return _well(orders.status())

    for kind in get_args(Verb):
        runtime.expose(f"control/{kind.__struct_config__.tag}", verb_route(kind, orders))
    runtime.expose("control/status", status)


def verb_route(kind: type[Verb], orders: Orders) -> Route:
    """Return the route for verbs of one kind."""

    async def route(body: Wire) -> Wire:
        started = asyncio.get_running_loop().time()
        name = str(kind.__struct_config__.tag)
        try:
            outcome = await orders.obey(_verb(kind, body))
        except BatonError as error:
            log.warning("control: %s: %s: %s", name, error.code, error.message)
            return {"status": "error", "code": error.code, "message": error.message}
        log.info("control: %s: %s (%.2f s)", name, outcome.message, asyncio.get_running_loop().time() - started)
        return _well(outcome)

    return route


def _verb(kind: type[Verb], body: object) -> Verb:
    """Return the verb that `body` describes; no body at all is an empty one."""
    try:
        return convert({} if body is None else body, kind)
    except DecodeError as error:
        raise InvalidRequest(f"{kind.__struct_config__.tag}: {error}") from None


def _well(value: msgspec.Struct) -> Wire:
    fields = msgspec.json.decode(msgspec.json.encode(value, order="deterministic"), type=dict[str, object])
    return {"status": "ok", **fields}
