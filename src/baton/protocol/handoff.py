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


class Produce(msgspec.Struct, frozen=True, kw_only=True, tag="produce"):
    """This work computes KV that another worker will take."""

    bootstrap: Bootstrap | None = None


class Consume(msgspec.Struct, frozen=True, kw_only=True, tag="consume"):
    """This work continues from KV that another worker computed."""

    source: Bootstrap | PrefillResult


Handoff = Produce | Consume
