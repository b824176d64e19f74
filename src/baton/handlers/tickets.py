"""Tickets for what other workers hold: read from what the frontend sends, made where it leaves that to us."""

import secrets
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.errors import InvalidRequest
from baton.protocol.codec import DecodeError, convert
from baton.protocol.handoff import ROOM_BITS, Bootstrap, Port, PrefillResult, Room, Ticket
from baton.protocol.requests import GenerateRequest

SECRET_BYTES = 16

_PREFILL = "prefill_result.disaggregated_params"


class _Written(msgspec.Struct, frozen=True):
    """A ticket in words of ours."""

    host: Annotated[str, Meta(min_length=1)]
    port: Port
    room: Room
    secret: Annotated[str, Meta(min_length=2)]


class _Params(msgspec.Struct, frozen=True):
    """What a late hand-off or an encode worker tells: our ticket, and what the engines tell each other by themselves.

    Both are a level down: of a `bootstrap_room` on top the frontend would make a room of its own.
    """

    ticket: _Written
    engine: dict[str, object] = {}


def ticket_of(request: GenerateRequest) -> Ticket | None:
    """Return the ticket that a request carries, if it has one. Raises InvalidRequest for one that cannot be read."""
    if request.bootstrap is not None:
        return ticket_from(request.bootstrap)
    if request.prefill_result is None:
        return None
    return _ticket(_read(request.prefill_result.disaggregated_params, _PREFILL).ticket, _PREFILL)


def encoder_ticket(result: dict[str, object]) -> tuple[Ticket, dict[str, object]]:
    """Return the ticket in an `encoder_result`, and what the engine said. Raises InvalidRequest."""
    params = _read(result, "encoder_result")
    return _ticket(params.ticket, "encoder_result"), params.engine


def for_engine(result: PrefillResult) -> PrefillResult:
    """Return `result` with nothing in it but what the prefill's engine said. Raises InvalidRequest."""
    return msgspec.structs.replace(result, disaggregated_params=_read(result.disaggregated_params, _PREFILL).engine)


def _read(raw: dict[str, object], place: str) -> _Params:
    try:
        return convert(raw, _Params)
    except DecodeError as error:
        raise InvalidRequest(f"{place}: {error}") from None


def _ticket(written: _Written, place: str) -> Ticket:
    try:
        secret = bytes.fromhex(written.secret)
    except ValueError as error:
        raise InvalidRequest(f"{place}.ticket.secret: {error}") from None
    return Ticket(host=written.host, port=written.port, room=written.room, secret=secret)


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


def params_of(ticket: Ticket, engine: dict[str, object] | None = None) -> dict[str, object]:
    """Return the ticket, and what the engine says, as the frontend hands them on to another worker."""
    written = {"host": ticket.host, "port": ticket.port, "room": ticket.room, "secret": ticket.secret.hex()}
    return {"ticket": written} if engine is None else {"ticket": written, "engine": engine}
