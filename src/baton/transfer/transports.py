"""The transports that work for a KV cache on this host, in the order of `--kv-transports`."""

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from baton.config.peer_tls import PeerTls
from baton.config.transfer import KvTransferOptions, chosen_transports
from baton.engine_kit.cuda.driver import Driver, find_driver
from baton.engine_kit.cuda.regions import region_at
from baton.errors import ConfigError
from baton.ports.transfer import BlockMemory, Check, TransportClient, TransportServer
from baton.transfer import nixl
from baton.transfer.device_copy import DeviceCopier, Staging
from baton.transfer.shm import ShmClient, ShmServer
from baton.transfer.tcp import TcpClient, TcpServer

log = logging.getLogger(__name__)

T = TypeVar("T")


def transport_servers(
    options: KvTransferOptions, memory: BlockMemory, check: Check, is_encrypted: bool = False
) -> dict[str, TransportServer]:
    """Return the transports by which other workers can read `memory`, best first. Raises ConfigError if none works."""
    builders: dict[str, Callable[[], TransportServer]] = {}
    driver, region = _driver_of(memory), region_at(memory.address)
    if memory.descriptor is not None or (driver is not None and region is not None):
        builders["shm"] = lambda: ShmServer(memory, check, options.max_connections, region=region)
    if nixl.available():
        builders["nixl"] = lambda: nixl.NixlServer(memory)
    if memory.device == "cpu" or driver is not None:
        builders["tcp"] = lambda: TcpServer(memory, check, options.checksum, staging=_staging(memory, driver))
    return _build_chosen(options, builders, is_encrypted)


def transport_clients(
    options: KvTransferOptions, memory: BlockMemory, tls: PeerTls | None = None
) -> tuple[TransportClient, ...]:
    """Return the transports by which KV can be read into `memory`, best first. Raises ConfigError if none works."""
    builders: dict[str, Callable[[], TransportClient]] = {}
    driver = _driver_of(memory)
    if memory.device == "cpu" or driver is not None:
        builders["shm"] = lambda: ShmClient(memory, copier=DeviceCopier(memory, driver) if driver is not None else None)
        builders["tcp"] = lambda: TcpClient(
            memory, options.checksum, options.connect_timeout_s, tls=tls, staging=_staging(memory, driver)
        )
    if nixl.available():
        builders["nixl"] = lambda: nixl.NixlClient(memory)
    return tuple(_build_chosen(options, builders, tls is not None).values())


def _driver_of(memory: BlockMemory) -> Driver | None:
    """Return the driver of the GPU that `memory` is on, None for memory of the host and for other devices."""
    return find_driver() if memory.device.startswith("cuda") else None


def _staging(memory: BlockMemory, driver: Driver | None) -> Staging | None:
    return Staging(memory, driver) if driver is not None else None


def _build_chosen(
    options: KvTransferOptions, builders: Mapping[str, Callable[[], T]], is_encrypted: bool
) -> dict[str, T]:
    chosen = [name for name in chosen_transports(options) if name in builders]
    if is_encrypted and "nixl" in chosen:
        if options.transports == "auto":
            chosen.remove("nixl")  # it sends KV in plain text
        else:
            log.warning(
                "KV that nixl moves is not encrypted: protect its network, or leave nixl out of --kv-transports"
            )
    built = {name: builders[name]() for name in chosen}
    if not built:
        raise ConfigError(f"none of the transports {options.transports} (--kv-transports) works here")
    return built
