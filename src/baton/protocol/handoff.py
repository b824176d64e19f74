"""The handoff of KV from a prefill worker to a decode worker: its wire shapes, and what engines get to know of it.

Engine adapters see only `Produce`, `Consume` and `LocalProbe`; the fields inside follow the frontend's contract.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from baton.protocol.extra import Extra, extra_field

ROOM_BITS = 63
MAX_SECRET_BYTES = 128

Room = Annotated[int, Meta(ge=0, le=2**ROOM_BITS - 1)]
Secret = Annotated[bytes, Meta(max_length=MAX_SECRET_BYTES)]
Port = Annotated[int, Meta(ge=0, le=65535)]


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """The room of a request whose address is known before prefill starts (early handoff)."""

    host: str = msgspec.field(name="bootstrap_host")
    port: Port = msgspec.field(name="bootstrap_port")
    room: Room = msgspec.field(name="bootstrap_room")
    handoff_id: object = None  # bytes from the frontend, text from elsewhere
    extra: Extra = extra_field()


class PrefillResult(msgspec.Struct, frozen=True, kw_only=True):
    """What prefill returned with its first token (late handoff)."""

    disaggregated_params: dict[str, object]
    prompt_tokens_details: dict[str, object] | None = None
    extra: Extra = extra_field()


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer needs to claim the KV of one request: the producer's address, the room and its secret."""

    host: str
    port: Port
    room: Room
    secret: Secret


class Produce(msgspec.Struct, frozen=True, kw_only=True, tag="produce"):
    """This work computes KV for another worker.

    An engine that moves KV itself connects to the other engine at `bootstrap`. Any other engine reports the computed
    blocks (`KvComputed`) and holds them until the work is aborted.
    """

    bootstrap: Bootstrap | None = None


class Consume(msgspec.Struct, frozen=True, kw_only=True, tag="consume"):
    """This work continues from KV that another worker computed.

    An engine that does not fetch KV itself allocates blocks (`KvWanted`) and continues when the KV is `received`.
    """

    source: Bootstrap | PrefillResult


class LocalProbe(msgspec.Struct, frozen=True, kw_only=True, tag="local_probe"):
    """This work is a health probe of a prefill or decode worker: the least its engine can do without the other role."""


Handoff = Produce | Consume | LocalProbe
