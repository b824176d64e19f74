"""A service that cannot be reached is reported at once, with the reason; the runtime would retry for minutes."""

import asyncio

import pytest

from baton.config.runtime import RuntimeOptions
from baton.errors import ConfigError
from baton.runtimes.dynamo.service_check import check_services
from baton.testing.bounded import run_bounded

UNUSED = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (RuntimeOptions(discovery="etcd", etcd=f"http://{UNUSED}"), "etcd.*refused.*--runtime-etcd"),
        (RuntimeOptions(requests="nats", nats=f"nats://{UNUSED}"), "NATS.*--runtime-nats"),
        (RuntimeOptions(events="nats", nats=f"nats://{UNUSED}"), "NATS.*--runtime-nats"),
        (RuntimeOptions(discovery="etcd", etcd="http://127.0.0.1:not-a-port"), "etcd.*not-a-port"),
    ],
)
def test_an_unreachable_service_is_reported_with_reason_and_flag(options: RuntimeOptions, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run_bounded(check_services(options))


def test_of_several_addresses_one_is_enough() -> None:
    async def body() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            await check_services(RuntimeOptions(discovery="etcd", etcd=f"http://{UNUSED},http://127.0.0.1:{port}"))

    run_bounded(body())


def test_file_discovery_needs_no_service() -> None:
    run_bounded(check_services(RuntimeOptions()))
