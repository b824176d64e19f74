"""Mutual TLS between processes: one authority, and a certificate of each process, for the planes between hosts."""

import ssl
from pathlib import Path

import msgspec

from baton.config.runtime import RuntimeOptions
from baton.errors import ConfigError

_FLAGS = {"tls_ca": "--runtime-tls-ca", "tls_certificate": "--runtime-tls-certificate", "tls_key": "--runtime-tls-key"}


class PeerTls(msgspec.Struct, frozen=True):
    """What both ends of a connection between processes need. Each verifies the other by the same authority."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    name: str
    """The name that the certificates of all processes have; addresses are not compared."""


def is_encrypted(options: RuntimeOptions) -> bool:
    """Whether the processes use TLS between them. Raises ConfigError if only some of its files are given."""
    missing = [flag for field, flag in _FLAGS.items() if not getattr(options, field)]
    if missing and len(missing) < len(_FLAGS):
        raise ConfigError(f"TLS between processes needs an authority, a certificate and its key: add {missing[0]}")
    return not missing


def peer_tls(options: RuntimeOptions) -> PeerTls | None:
    """Return the contexts for the files of `options`, None without them. Raises ConfigError."""
    if not is_encrypted(options):
        return None
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(tls_file(options.tls_ca))
            context.load_cert_chain(tls_file(options.tls_certificate), tls_file(options.tls_key), _no_passphrase)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"cannot use --runtime-tls-certificate {options.tls_certificate} with --runtime-tls-key"
                f" {options.tls_key} and --runtime-tls-ca {options.tls_ca}: {error}"
            ) from None
    return PeerTls(server, client, options.tls_name)


def plain_text_planes(options: RuntimeOptions) -> list[str]:
    """Return what still travels in plain text between hosts although the processes use TLS, with the flag to change."""
    if not is_encrypted(options) or options.discovery == "file":
        return []
    planes = []
    if options.discovery == "etcd" and not all(_etcd_uses_tls(options)):
        planes.append("discovery (use https: in --runtime-etcd)")
    if options.events == "zmq":
        planes.append("KV events and load (use --runtime-events nats, or close their ports to other hosts)")
    if "nats" in (options.requests, options.events) and not options.nats.startswith("tls:"):
        planes.append("NATS (use tls: in --runtime-nats)")
    return planes


def uses_etcd_tls(options: RuntimeOptions) -> bool:
    """Whether etcd, or one of its members, is reached over TLS."""
    return any(_etcd_uses_tls(options))


def _etcd_uses_tls(options: RuntimeOptions) -> list[bool]:
    """Return for each address of etcd whether it is reached over TLS."""
    return [address.strip().startswith("https:") for address in options.etcd.split(",") if address.strip()]


def _no_passphrase() -> str:
    """OpenSSL calls this for a key with a passphrase, and would ask for it on the terminal otherwise."""
    raise ConfigError("the private key of --runtime-tls-key has a passphrase: give a key without one")


def tls_file(path: str) -> Path:
    """Return the path of a file of TLS."""
    return Path(path).expanduser()
