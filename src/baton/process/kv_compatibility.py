"""Whether prefill and decode workers can hand KV to each other: told by each, and asked by each when it starts.

A pair that starts at the same time finds out as well: everyone can be asked before he asks.
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

FIND_S = 0.5
ANSWER_S = 1.5
OTHER_ROLE = {"prefill": "decode", "decode": "prefill"}
_OPTIONS = {"block_size": "block_size", "dtype": "dtype"}


def kv_path(settings: Settings, role: str) -> str:
    """Return where workers of `role` tell what their KV is like."""
    return f"{settings.namespace}.{role}.kv"


def kv_service(shape: KvShape) -> Service[None, KvShape]:
    """Return what tells others the shape of this worker's KV."""

    async def tell(_: None, context: Context) -> AsyncGenerator[KvShape, None]:
        yield shape

    return Service(tell, lambda _: None, msgspec.to_builtins)


async def refuse_unlike_peers(runtime: Runtime, settings: Settings, role: str, shape: KvShape) -> None:
    """Ask those who are there of the other role. Raises ConfigError, saying what to change, if one has other KV.

    Takes some two seconds at most. Nobody there is fine; who does not answer is left alone.
    """
    other = OTHER_ROLE[role]
    client = await runtime.client(kv_path(settings, other))
    try:
        found = await client.ready(FIND_S)
    except PeerLost:
        return
    for theirs in await asyncio.gather(*(_ask(client, instance, other) for instance in found)):
        if theirs is not None and theirs != shape:
            raise ConfigError(difference(shape, theirs, other, settings.engine))


def difference(mine: KvShape, theirs: KvShape, other: str, engine: str) -> str:
    """Return in words what two shapes do not have in common, and what would mend it."""
    # Weights of another type are another model, and another model has everything else of its own.
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


async def _ask(client: Client, instance: int, role: str) -> KvShape | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await _answer(client, instance)
    except (TimeoutError, DecodeError, BatonError) as error:
        log.warning("a %s worker did not say what its KV is like: %r", role, error)
        return None


async def _answer(client: Client, instance: int) -> KvShape:
    question: Wire = {}
    async with aclosing(client.call(question, instance)) as answers:
        shapes = [convert(answer, KvShape) async for answer in answers]
    if not shapes:
        raise PeerLost("an empty answer")
    return shapes[0]
