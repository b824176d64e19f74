"""The transports that work for a KV cache on this host, in the order of `--kv-transports`."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from baton.config.transfer import KvTransferOptions, chosen_transports
from baton.errors import ConfigError
from baton.ports.transfer import BlockMemory, Check, TransportClient, TransportServer
from baton.transfer import nixl
from baton.transfer.shm import ShmClient, ShmServer
from baton.transfer.tcp import TcpClient, TcpServer

T = TypeVar("T")


def transport_servers(options: KvTransferOptions, memory: BlockMemory, check: Check) -> dict[str, TransportServer]:
    """Return the transports by which other workers can read `memory`, best first. Raises ConfigError if none works."""
    builders: dict[str, Callable[[], TransportServer]] = {}
    if memory.descriptor is not None:
        builders["shm"] = lambda: ShmServer(memory, check, options.max_connections)
    if nixl.available():
        builders["nixl"] = lambda: nixl.NixlServer(memory)
    if memory.device == "cpu":
        builders["tcp"] = lambda: TcpServer(memory, check, options.checksum)
    return _build_chosen(options, builders)


def transport_clients(options: KvTransferOptions, memory: BlockMemory) -> tuple[TransportClient, ...]:
    """Return the transports by which KV can be read into `memory`, best first. Raises ConfigError if none works."""
    builders: dict[str, Callable[[], TransportClient]] = {}
    if memory.device == "cpu":
        builders["shm"] = lambda: ShmClient(memory)
        builders["tcp"] = lambda: TcpClient(memory, options.checksum, options.connect_timeout_s)
    if nixl.available():
        builders["nixl"] = lambda: nixl.NixlClient(memory)
    return tuple(_build_chosen(options, builders).values())


def _build_chosen(options: KvTransferOptions, builders: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    built = {name: builders[name]() for name in chosen_transports(options) if name in builders}
    if not built:
        raise ConfigError(f"none of the transports {options.transports} (--kv-transports) works here")
    return built
