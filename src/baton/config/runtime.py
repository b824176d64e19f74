"""Options of the Dynamo runtime."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class RuntimeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where processes find each other and how they talk."""

    discovery: Annotated[
        Literal["file", "etcd", "kubernetes"], Meta(description="how workers and frontends find each other")
    ] = "file"
    requests: Annotated[Literal["tcp", "nats"], Meta(description="how requests travel")] = "tcp"
    events: Annotated[Literal["zmq", "nats"], Meta(description="how KV events and load travel")] = "zmq"
    bind: Annotated[
        str,
        Meta(description="the IP that this process listens on for other workers; they must be able to reach it"),
    ] = "127.0.0.1"
    directory: Annotated[str, Meta(description="where file discovery keeps its records")] = ""
    etcd: Annotated[str, Meta(description="etcd addresses, separated by commas")] = "http://127.0.0.1:2379"
    nats: Annotated[str, Meta(description="NATS address")] = "nats://127.0.0.1:4222"
    log: Annotated[str, Meta(description="log filter of the Rust runtime")] = "error"
