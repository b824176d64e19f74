"""Settings of the hand-off from prefill to decode workers."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

TRANSPORTS = ("shm", "nixl", "tcp")  # best first

Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class KvTransferOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How KV gets from one worker to another, and how long each side waits for the other."""

    transports: Annotated[
        str,
        Meta(
            pattern="^(auto|(shm|nixl|tcp)(,(shm|nixl|tcp))*)$",
            description="ways for KV to take, best first: shm (one host), nixl (RDMA), tcp; auto is all that work here",
        ),
    ] = "auto"
    handoff: Annotated[
        Literal["auto", "early", "late"],
        Meta(description="whether decode is called with prefill or after it; auto is what the engine does best"),
    ] = "auto"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of a prefill worker's rooms; 0 is any free one")] = 0
    claim_timeout_s: Annotated[
        Seconds, Meta(description="longest that KV waits to be claimed, and a claim for its KV")
    ] = 10.0
    connect_timeout_s: Annotated[Seconds, Meta(description="longest that a connection to another worker may take")] = (
        3.0
    )
    heartbeat_s: Annotated[Seconds, Meta(description="how often the two sides of a room show that they live")] = 1.0
    peer_timeout_s: Annotated[Seconds, Meta(description="silence after which the other side is taken for lost")] = 5.0
    checksum: Annotated[bool, Meta(description="verify KV that travels over tcp")] = False


def chosen_transports(options: KvTransferOptions) -> tuple[str, ...]:
    """Return the ways to try, best first."""
    return TRANSPORTS if options.transports == "auto" else tuple(dict.fromkeys(options.transports.split(",")))
