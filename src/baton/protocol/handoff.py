"""How a prefill worker's KV reaches a decode worker: the wire shapes and the two sides of the hand-off.

Engine adapters see only `Produce` and `Consume`; what is inside them is the frontend's contract.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from baton.protocol.extra import Extra, extra_field

ROOM_BITS = 63

Room = Annotated[int, Meta(ge=0, le=2**ROOM_BITS - 1)]
Port = Annotated[int, Meta(ge=0, le=65535)]


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """Where prefill and decode meet when the address is known before compute (early hand-off)."""

    host: str = msgspec.field(name="bootstrap_host")
    port: Port = msgspec.field(name="bootstrap_port")
    room: Room = msgspec.field(name="bootstrap_room")
    handoff_id: object = None  # bytes from the frontend, text from elsewhere
    extra: Extra = extra_field()


class PrefillResult(msgspec.Struct, frozen=True, kw_only=True):
    """What prefill returned with its first token (late hand-off)."""

    disaggregated_params: dict[str, object]
    prompt_tokens_details: dict[str, object] | None = None
    extra: Extra = extra_field()


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes to get the KV of one request: where, which room, and the secret that opens it."""

    host: str
    port: Port
    room: Room
    secret: bytes


class Produce(msgspec.Struct, frozen=True, kw_only=True, tag="produce"):
    """This work computes KV that another worker will take.

    An engine that moves KV by itself meets the other one at `bootstrap`. One that does not tells what it has computed,
    and holds it until the work is aborted.
    """

    bootstrap: Bootstrap | None = None


class Consume(msgspec.Struct, frozen=True, kw_only=True, tag="consume"):
    """This work continues from KV that another worker computed.

    An engine that does not fetch it by itself says where it wants it, and goes on when it has been `received`.
    """

    source: Bootstrap | PrefillResult


class LocalProbe(msgspec.Struct, frozen=True, kw_only=True, tag="trial"):
    """This work is a probe of a worker that needs another one: the least its engine can do of its part, alone."""


Handoff = Produce | Consume | LocalProbe
