"""Settings of the Dynamo runtime."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class RuntimeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Discovery, and the transports for requests and events."""

    discovery: Annotated[
        Literal["file", "etcd", "kubernetes"],
        Meta(description="Discovery backend. file: one host. etcd, kubernetes: several."),
    ] = "file"
    requests: Annotated[Literal["tcp", "nats"], Meta(description="Transport for requests and responses.")] = "tcp"
    events: Annotated[
        Literal["zmq", "nats"],
        Meta(
            description="Transport for KV events and load. zmq: Unix sockets with file discovery; with other discovery"
            " each worker listens on two TCP ports of every interface. nats: through the NATS server."
        ),
    ] = "zmq"
    bind: Annotated[
        str,
        Meta(
            description="IP address that this process listens on and announces to other processes. Empty: 127.0.0.1"
            " with file discovery, else the address of the interface that reaches etcd or the Kubernetes API."
        ),
    ] = ""
    directory: Annotated[
        str,
        Meta(
            description="Directory of file discovery, shared by all processes of a deployment. Empty:"
            " ~/.cache/baton/discovery, or a temporary directory for `serve`."
        ),
    ] = ""
    etcd: Annotated[str, Meta(description="Comma-separated etcd addresses.")] = "http://127.0.0.1:2379"
    nats: Annotated[str, Meta(description="NATS address.")] = "nats://127.0.0.1:4222"
    tls_ca: Annotated[
        str,
        Meta(
            description="PEM file with the authority that has signed the certificates of all processes, and of etcd and"
            " NATS where their addresses begin with https: or tls:. With it, requests and KV between processes are"
            " encrypted, and both ends of a connection need a certificate. Empty: plain text."
        ),
    ] = ""
    tls_certificate: Annotated[
        str, Meta(description="PEM file with the certificate of this process, for servers and clients. See tls_ca.")
    ] = ""
    tls_key: Annotated[str, Meta(description="PEM file with the private key of tls_certificate.")] = ""
    tls_name: Annotated[
        str, Meta(description="DNS name in the certificates of all processes; addresses are not compared.")
    ] = "baton"
    log: Annotated[str, Meta(description="Log filter of the Rust runtime (its DYN_LOG).")] = "error"
