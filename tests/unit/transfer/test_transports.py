"""Transports are built in the order of the setting, as far as they work for a cache."""

import msgspec
import pytest

from baton.config.transfer import KvTransferOptions
from baton.errors import ConfigError
from baton.ports.transfer import BlockMemory
from baton.testing import run_bounded
from baton.transfer import nixl
from baton.transfer.transports import transport_clients, transport_servers
from tests.unit.transfer.kv_caches import SHAPE, Cache, only

NIXL = ["nixl"] if nixl.available() else []
GPU = BlockMemory(shape=SHAPE, address=0, planes=1, plane_bytes=10, block_bytes=10, blocks=1, device="xpu:0")


def names(transports: str, memory: BlockMemory) -> tuple[list[str], list[str]]:
    """Return the names of the servers and of the clients."""

    async def body() -> tuple[list[str], list[str]]:
        options = KvTransferOptions(transports=transports)
        servers, clients = transport_servers(options, memory, only(None)), transport_clients(options, memory)
        for each in (*servers.values(), *clients):
            await each.close()
        return list(servers), [client.name for client in clients]

    return run_bounded(body())


def test_auto_is_every_transport_that_works_best_first() -> None:
    cache = Cache(1)
    assert names("auto", cache.memory) == (["shm", *NIXL, "tcp"],) * 2


def test_the_order_of_the_setting_is_kept() -> None:
    cache = Cache(1)
    assert names("tcp,shm,tcp", cache.memory) == (["tcp", "shm"],) * 2


def test_a_cache_that_is_not_a_file_is_not_served_by_shm() -> None:
    cache = Cache(1)
    assert names("shm,tcp", msgspec.structs.replace(cache.memory, descriptor=None)) == (["tcp"], ["shm", "tcp"])


def test_no_working_transport_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="none of the transports shm,tcp"):
        names("shm,tcp", GPU)
