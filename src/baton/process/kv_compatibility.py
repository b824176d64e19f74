"""Whether prefill and decode workers have the same KV shape. Each serves its own, and compares when it starts.

A worker serves its shape before it asks for those of its peers, so a pair that starts at the same time finds out too.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from baton.config.load import options
from baton.config.settings import Settings
from baton.errors import BatonError, ConfigError, PeerLost
from baton.ports.runtime import Client, Context, Runtime, Service, Wire
from baton.ports.transfer import KvShape
from baton.protocol.codec import DecodeError, convert

log = logging.getLogger(__name__)

FIND_TIMEOUT_S = 0.5
REPLY_TIMEOUT_S = 1.5
OTHER_ROLE = {"prefill": "decode", "decode": "prefill"}
_OPTIONS = {"block_size": "block_size", "dtype": "dtype"}


def kv_path(settings: Settings, role: str) -> str:
    """Return the path at which workers of `role` serve the shape of their KV."""
    return f"{settings.namespace}.{role}.kv"


def kv_service(shape: KvShape) -> Service[None, KvShape]:
    """Return a service that replies with the shape of this worker's KV."""

    async def reply(_: None, context: Context) -> AsyncGenerator[KvShape, None]:
        yield shape

    return Service(reply, lambda _: None, msgspec.to_builtins)


async def refuse_incompatible_peers(runtime: Runtime, settings: Settings, role: str, shape: KvShape) -> None:
    """Compare with the workers of the other role that run now. Raises ConfigError, naming the flag to change.

    Takes two seconds at most. A worker that does not reply is ignored.
    """
    other = OTHER_ROLE[role]
    client = await runtime.client(kv_path(settings, other))
    try:
        instances = await client.ready(FIND_TIMEOUT_S)
    except PeerLost:
        return
    for theirs in await asyncio.gather(*(_shape_of(client, instance, other) for instance in instances)):
        if theirs is not None and theirs != shape:
            raise ConfigError(difference(shape, theirs, other, settings.engine))


def difference(mine: KvShape, theirs: KvShape, other: str, engine: str) -> str:
    """Return a message that names the first difference between two shapes, and the flag that fixes it."""
    # Another dtype changes the model's hash, and another model most other fields: name the cause first.
    names = ("dtype", "model", *mine.__struct_fields__)
    name = next(name for name in names if getattr(mine, name) != getattr(theirs, name))
    here, there = getattr(mine, name), getattr(theirs, name)
    if name == "block_size":
        problem = f"this worker's KV blocks have {here} tokens, those of the {other} workers {there}"
    else:
        problem = f"{name.replace('_', ' ')} of this worker's KV is {here}, of the {other} workers' {there}"
    return f"{problem}: give both the same {_flag(name, engine)}"


def _flag(name: str, engine: str) -> str:
    flags = [option.flag for option in options() if option.path == (engine, _OPTIONS.get(name))]
    return flags[0] if flags else "--model"


async def _shape_of(client: Client, instance: int, role: str) -> KvShape | None:
    try:
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            return await _request_shape(client, instance)
    except (TimeoutError, DecodeError, BatonError) as error:
        log.warning("a %s worker did not reply with the shape of its KV: %r", role, error)
        return None


async def _request_shape(client: Client, instance: int) -> KvShape:
    request: Wire = {}
    async with aclosing(client.call(request, instance)) as replies:
        shapes = [convert(reply, KvShape) async for reply in replies]
    if not shapes:
        raise PeerLost("an empty reply")
    return shapes[0]
