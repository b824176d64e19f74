"""Tickets for KV and media that other workers hold: read from requests, created here, written to chunks."""

import secrets
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from baton.errors import InvalidRequest
from baton.protocol.codec import DecodeError, convert
from baton.protocol.handoff import MAX_SECRET_BYTES, ROOM_BITS, Bootstrap, Port, PrefillResult, Room, Ticket
from baton.protocol.media import EncodedMedia
from baton.protocol.requests import GenerateRequest

SECRET_BYTES = 16

_PREFILL = "prefill_result.disaggregated_params"


class _WireTicket(msgspec.Struct, frozen=True):
    """A ticket on the wire."""

    host: Annotated[str, Meta(min_length=1)]
    port: Port
    room: Room
    secret: Annotated[str, Meta(min_length=2, max_length=2 * MAX_SECRET_BYTES)]  # hexadecimal


class _Params(msgspec.Struct, frozen=True):
    """The parameters of a late handoff or of an encode worker: our ticket, and the engine's own parameters or our rows.

    All are nested: the frontend would read a `bootstrap_room` at the top level as a room of its own.
    """

    ticket: _WireTicket
    engine: dict[str, object] = {}
    media: EncodedMedia | None = None


class EncoderResult(NamedTuple):
    """What an encode worker returned: the ticket of its room, and the engine's parameters or the rows in the room."""

    ticket: Ticket
    params: dict[str, object]
    media: EncodedMedia | None


def ticket_of(request: GenerateRequest) -> Ticket | None:
    """Return the ticket that a request carries, if it has one. Raises InvalidRequest for one that cannot be read."""
    if request.bootstrap is not None:
        return ticket_from(request.bootstrap)
    if request.prefill_result is None:
        return None
    return _ticket(_read(request.prefill_result.disaggregated_params, _PREFILL).ticket, _PREFILL)


def read_encoder_result(result: dict[str, object]) -> EncoderResult:
    """Return what is in the `encoder_result` of a request. Raises InvalidRequest."""
    params = _read(result, "encoder_result")
    return EncoderResult(_ticket(params.ticket, "encoder_result"), params.engine, params.media)


def engine_params(result: PrefillResult) -> PrefillResult:
    """Return `result` with only the parameters of the prefill's engine. Raises InvalidRequest."""
    return msgspec.structs.replace(result, disaggregated_params=_read(result.disaggregated_params, _PREFILL).engine)


def cached_tokens_of(result: PrefillResult | None) -> int | None:
    """Return how many tokens of the prompt the prefill had cached, if it has reported that."""
    details = result.prompt_tokens_details if result is not None else None
    count = details.get("cached_tokens") if details is not None else None
    return count if isinstance(count, int) else None


def _read(raw: dict[str, object], place: str) -> _Params:
    try:
        return convert(raw, _Params)
    except DecodeError as error:
        raise InvalidRequest(f"{place}: {error}") from None


def _ticket(wire: _WireTicket, place: str) -> Ticket:
    try:
        secret = bytes.fromhex(wire.secret)
    except ValueError as error:
        raise InvalidRequest(f"{place}: the secret of the ticket cannot be read: {error}") from None
    return Ticket(host=wire.host, port=wire.port, room=wire.room, secret=secret)


def ticket_from(bootstrap: Bootstrap) -> Ticket:
    """Return the ticket that the frontend sent to both workers, or that it got from the prefill worker.

    Raises InvalidRequest for one without a secret.
    """
    chosen, at, host = bootstrap.host.rpartition("@")
    if at:
        wire = _WireTicket(host=host, port=bootstrap.port, room=bootstrap.room, secret=chosen)
        return _ticket(wire, "bootstrap_info.bootstrap_host")
    match bootstrap.handoff_id:
        case str(text):
            secret = text.encode()
        case bytes() | bytearray() as data:
            secret = bytes(data)
        case _:
            secret = b""
    if not secret:
        raise InvalidRequest("bootstrap_info.handoff_id: missing; it is the secret that protects the KV of the room")
    if len(secret) > MAX_SECRET_BYTES:
        raise InvalidRequest(f"bootstrap_info.handoff_id: {len(secret)} bytes; {MAX_SECRET_BYTES} at most")
    return Ticket(host=bootstrap.host, port=bootstrap.port, room=bootstrap.room, secret=secret)


def new_ticket(address: tuple[str, int], dp_rank: int, dp_size: int) -> Ticket:
    """Return a ticket with a random room, whose remainder by `dp_size` is the rank that holds the KV."""
    host, port = address
    rounds = (2**ROOM_BITS - 1 - dp_rank) // dp_size
    room = secrets.randbelow(rounds + 1) * dp_size + dp_rank
    return Ticket(host=host, port=port, room=room, secret=secrets.token_bytes(SECRET_BYTES))


def bootstrap_params(ticket: Ticket) -> dict[str, object]:
    """Return a ticket of the prefill worker in the form that the frontend copies to `bootstrap_info` of the decode.

    It copies only these three, and adds an id that the prefill worker does not know. So the secret is part of the host.
    """
    host = f"{ticket.secret.hex()}@{ticket.host}"
    return {"bootstrap_host": host, "bootstrap_port": ticket.port, "bootstrap_room": ticket.room}


def params_of(ticket: Ticket, engine: dict[str, object] | None = None) -> dict[str, object]:
    """Return the ticket and the engine's parameters in the form that the frontend forwards to another worker."""
    wire = {"host": ticket.host, "port": ticket.port, "room": ticket.room, "secret": ticket.secret.hex()}
    return {"ticket": wire} if engine is None else {"ticket": wire, "engine": engine}


def rows_params(ticket: Ticket, media: EncodedMedia) -> dict[str, object]:
    """Return the ticket and the descriptor of its rows in the form that the frontend forwards to another worker."""
    return {**params_of(ticket), "media": msgspec.to_builtins(media)}
