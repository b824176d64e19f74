"""Processes on several hosts, found through the runtime."""

import asyncio

from baton.config.runtime import RuntimeOptions
from baton.config.settings import Settings
from baton.process.location_service import LOCATION_PATH, location_service, serve_location, system_url
from baton.protocol.locations import ProcessLocation
from baton.testing.memory_runtime import MemoryRuntime
from baton.views.discovered import DiscoveredProcesses, addresses


def location(name: str, namespace: str, host: str) -> ProcessLocation:
    return ProcessLocation(name=name, namespace=namespace, url=f"http://{host}:9090")


def test_processes_of_other_namespaces_are_not_shown_and_names_are_unique() -> None:
    found = addresses(
        [
            location("prefill-7", "baton-prefill-fast", "10.0.0.1"),
            location("prefill-7", "baton-prefill-fast", "10.0.0.2"),
            location("worker-1", "other", "10.0.0.3"),
        ],
        "baton",
        "token",
    )
    assert [(each.name, each.token) for each in found] == [
        ("prefill-7@10.0.0.1:9090", "token"),
        ("prefill-7@10.0.0.2:9090", "token"),
    ]


def test_a_process_on_one_host_serves_no_location() -> None:
    served: list[str] = []

    async def serve(path: str, _: object) -> None:
        served.append(path)

    async def run() -> None:
        await serve_location(serve, Settings(), "decode", "http://127.0.0.1:1")
        assert served == []
        await serve_location(serve, Settings(runtime=RuntimeOptions(discovery="etcd")), "decode", "http://10.0.0.1:1")
        assert served == [LOCATION_PATH]

    asyncio.run(run())


def test_a_system_server_on_all_interfaces_is_at_the_address_of_the_runtime() -> None:
    runtime = RuntimeOptions(discovery="etcd", bind="10.0.0.9")
    assert system_url(Settings(system_host="0.0.0.0", system_port=9090, runtime=runtime)) == "http://10.0.0.9:9090"
    assert system_url(Settings(system_host="fd00::1", system_port=9090, runtime=runtime)) == "http://[fd00::1]:9090"


def test_locations_are_asked_for_once_and_forgotten_when_an_instance_leaves() -> None:
    async def run() -> None:
        runtime = MemoryRuntime()
        await runtime.start()
        there = location_service(location("decode-0", "baton", "10.0.0.1"))
        endpoint = await runtime.serve(LOCATION_PATH, there)
        finder = DiscoveredProcesses(runtime, LOCATION_PATH, "baton", "token")
        assert [each.url for each in await finder.find()] == ["http://10.0.0.1:9090"]
        await endpoint.deregister()
        assert list(await finder.find()) == []
        await runtime.shutdown()

    asyncio.run(run())
