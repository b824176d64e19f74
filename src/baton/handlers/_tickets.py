"""Tickets for KV: read from what the frontend sends, made where it leaves that to us."""

import secrets
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.errors import InvalidRequest
from baton.protocol.codec import DecodeError, convert
from baton.protocol.handoff import ROOM_BITS, Bootstrap, Port, Room, Ticket
from baton.protocol.requests import GenerateRequest

SECRET_BYTES = 16


class _Written(msgspec.Struct, frozen=True):
    """A ticket in words that mean nothing to the frontend: of a `bootstrap_room` it would make a room of its own."""

    host: Annotated[str, Meta(min_length=1)]
    port: Port
    room: Room
    secret: Annotated[str, Meta(min_length=2)]


def ticket_of(request: GenerateRequest) -> Ticket | None:
    """Return the ticket that a request carries, if it has one. Raises InvalidRequest for one that cannot be read."""
    if request.bootstrap is not None:
        return ticket_from(request.bootstrap)
    if request.prefill_result is None:
        return None
    try:
        written = convert(request.prefill_result.disaggregated_params, _Written)
        return Ticket(host=written.host, port=written.port, room=written.room, secret=bytes.fromhex(written.secret))
    except (DecodeError, ValueError) as error:
        raise InvalidRequest(f"prefill_result.disaggregated_params: {error}") from None


def ticket_from(bootstrap: Bootstrap) -> Ticket:
    """Return the ticket that the frontend gave to both sides. Raises InvalidRequest for one without a secret."""
    given = bootstrap.handoff_id
    secret = given.encode() if isinstance(given, str) else bytes(given) if isinstance(given, bytes | bytearray) else b""
    if not secret:
        raise InvalidRequest("bootstrap_info.handoff_id: missing; without it anybody could take the KV of the room")
    return Ticket(host=bootstrap.host, port=bootstrap.port, room=bootstrap.room, secret=secret)


def new_ticket(address: tuple[str, int], dp_rank: int, dp_size: int) -> Ticket:
    """Return a ticket of our own; the room's remainder by `dp_size` is the rank that holds the KV."""
    host, port = address
    rounds = (2**ROOM_BITS - 1 - dp_rank) // dp_size
    room = secrets.randbelow(rounds + 1) * dp_size + dp_rank
    return Ticket(host=host, port=port, room=room, secret=secrets.token_bytes(SECRET_BYTES))


def params_of(ticket: Ticket) -> dict[str, object]:
    """Return the ticket as the frontend hands it on to a decode worker."""
    return {"host": ticket.host, "port": ticket.port, "room": ticket.room, "secret": ticket.secret.hex()}
