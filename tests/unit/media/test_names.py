"""Looking up host names: slow ones do not delay others."""

import asyncio
import socket
import threading
from collections import Counter

import pytest

from baton.media.names import THREADS_PER_DOMAIN, NameLookup
from baton.testing import eventually, run_bounded


class NameServer:
    """Answers every name, those of the slow domains only when it is told to."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.answer = threading.Event()

    def look_up(self, host: str, family: socket.AddressFamily) -> list[tuple[int, str]]:
        self.asked[host] += 1
        if host.endswith(("slow.example", "slow.co.uk")):
            self.answer.wait(30)
        if host == "unknown.example":
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, "192.0.2.1")]


def addresses(found: list) -> list[str]:
    return [each["host"] for each in found]


def test_slow_names_delay_neither_other_names_nor_the_default_threads() -> None:
    async def body() -> None:
        server = NameServer()
        names = NameLookup(server.look_up, timeout_s=30)
        slow = [asyncio.create_task(names.resolve(f"n{number}.slow.example", 80)) for number in range(100)]
        await eventually(lambda: len(server.asked) == THREADS_PER_DOMAIN)
        assert addresses(await names.resolve("fast.test", 80)) == ["192.0.2.1"]
        assert await asyncio.to_thread(lambda: "default pool") == "default pool"
        assert len(server.asked) == THREADS_PER_DOMAIN + 1, "the rest of the slow names waits for its domain"
        server.answer.set()
        assert all(addresses(found) == ["192.0.2.1"] for found in await asyncio.gather(*slow))
        await names.close()

    run_bounded(body())


def test_domains_of_one_country_have_threads_of_their_own() -> None:
    async def body() -> None:
        server = NameServer()
        names = NameLookup(server.look_up, timeout_s=30)
        slow = [asyncio.create_task(names.resolve(f"n{number}.slow.co.uk", 80)) for number in range(10)]
        await eventually(lambda: len(server.asked) == THREADS_PER_DOMAIN)
        assert addresses(await names.resolve("fast.co.uk", 80)) == ["192.0.2.1"]
        server.answer.set()
        await asyncio.gather(*slow)
        await names.close()

    run_bounded(body())


def test_a_lookup_that_takes_too_long_fails_and_does_not_take_further_threads() -> None:
    async def body() -> None:
        server = NameServer()
        names = NameLookup(server.look_up, timeout_s=0.05)
        for _ in range(3):
            with pytest.raises(OSError, match=r"could not be resolved within 0\.05 s"):
                await names.resolve("a.slow.example", 80)
        assert server.asked == {"a.slow.example": 1}, "one thread for one name"
        server.answer.set()
        await names.close()

    run_bounded(body())


def test_names_are_looked_up_again_each_time() -> None:
    async def body() -> None:
        server = NameServer()
        names = NameLookup(server.look_up)
        await names.resolve("fast.test", 80)
        await names.resolve("FAST.test.", 80)
        assert server.asked == {"fast.test": 2}
        with pytest.raises(socket.gaierror):
            await names.resolve("unknown.example", 80)
        await names.close()

    run_bounded(body())


def test_the_system_resolver_is_used() -> None:
    async def body() -> None:
        names = NameLookup()
        [found] = await names.resolve("localhost", 8080, socket.AF_INET)
        assert (found["host"], found["port"], found["family"]) == ("127.0.0.1", 8080, socket.AF_INET)
        await names.close()

    run_bounded(body())
