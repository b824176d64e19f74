"""Services that cannot be reached are named at once, instead of after the runtime's own minutes."""

import asyncio

import pytest

from baton.config.runtime import RuntimeOptions
from baton.errors import ConfigError
from baton.runtimes.dynamo.service_check import check_services
from baton.testing.bounded import run_bounded

NOBODY = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (RuntimeOptions(discovery="etcd", etcd=f"http://{NOBODY}"), "etcd.*--runtime-etcd"),
        (RuntimeOptions(requests="nats", nats=f"nats://{NOBODY}"), "NATS.*--runtime-nats"),
        (RuntimeOptions(events="nats", nats=f"nats://{NOBODY}"), "NATS.*--runtime-nats"),
        (RuntimeOptions(discovery="etcd", etcd="http://127.0.0.1:not-a-port"), "etcd"),
    ],
)
def test_a_service_that_does_not_answer_is_named_with_its_flag(options: RuntimeOptions, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run_bounded(check_services(options))


def test_of_several_addresses_one_is_enough() -> None:
    async def body() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            await check_services(RuntimeOptions(discovery="etcd", etcd=f"http://{NOBODY},http://127.0.0.1:{port}"))

    run_bounded(body())


def test_file_discovery_needs_no_service() -> None:
    run_bounded(check_services(RuntimeOptions()))
