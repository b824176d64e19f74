"""Settings of the KV transfer between prefill and decode workers."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

TRANSPORTS = ("shm", "nixl", "tcp")  # best first

Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class KvTransferOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How KV moves from one worker to another, and how long each side waits for the other."""

    transports: Annotated[
        str,
        Meta(
            pattern="^(auto|(shm|nixl|tcp)(,(shm|nixl|tcp))*)$",
            description="KV transports to use, in order of preference: shm (same host, or same GPU), nixl (RDMA),"
            " tcp (any network); auto tries all that work on this host",
        ),
    ] = "auto"
    handoff: Annotated[
        Literal["auto", "early", "late"],
        Meta(
            description="when the decode worker gets the request: early, together with the prefill worker, or late,"
            " after prefill; auto is the engine's preference"
        ),
    ] = "auto"
    port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="TCP port on which a prefill or encode worker accepts claims; 0 picks a free port; set it where"
            " a firewall needs a fixed one",
        ),
    ] = 0
    claim_timeout_s: Annotated[
        Seconds,
        Meta(
            description="seconds a prefill keeps KV for a decode worker that has not connected (and a decode waits for"
            " its prefill to start); raise it if requests queue for longer"
        ),
    ] = 10.0
    connect_timeout_s: Annotated[
        Seconds, Meta(description="seconds within which a connection to a prefill worker must be established")
    ] = 3.0
    heartbeat_s: Annotated[
        Seconds,
        Meta(description="seconds between heartbeats on a claim's connection; keep it well below kv.peer_timeout_s"),
    ] = 1.0
    peer_timeout_s: Annotated[
        Seconds,
        Meta(
            description="seconds without a heartbeat after which the other worker counts as lost and its requests fail"
            " over; raise it on busy hosts"
        ),
    ] = 5.0
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="connections that a prefill or encode worker accepts at one time on its KV port, and on its shm"
            " socket; a decode worker needs one for each request that waits for KV, and one more. When it is reached,"
            " connections that have not proved a secret are closed first",
        ),
    ] = 4096
    locality: Annotated[
        str,
        Meta(
            pattern=r"^$|^[^=,]+=[^=,]+$",
            description="place of this worker, as domain=value (zone=us-east-1a); the frontend selects a decode worker"
            " of the place of the prefill worker, with `--router kv`; empty: any place",
        ),
    ] = ""
    locality_enforcement: Annotated[
        Literal["required", "preferred"],
        Meta(description="required: a request fails without a decode worker of the same place; preferred: it moves"),
    ] = "required"
    checksum: Annotated[
        bool,
        Meta(description="verify KV sent over tcp with a CRC-32; lowers throughput; enable it on unreliable networks"),
    ] = False


def chosen_transports(options: KvTransferOptions) -> tuple[str, ...]:
    """Return the names of the transports to try, best first."""
    return TRANSPORTS if options.transports == "auto" else tuple(dict.fromkeys(options.transports.split(",")))
