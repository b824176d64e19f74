"""Presence: a worker is in discovery while there is no reason against it, whatever the order they come and go in."""

import asyncio

import pytest

from baton.control.discovery import DeregisterReason, DiscoveryRegistration
from baton.errors import EngineDead, PeerLost
from baton.ports.runtime import ModelCard
from baton.testing import run_bounded

UNHEALTHY, COMMANDED = DeregisterReason.UNHEALTHY, DeregisterReason.COMMANDED


class Register:
    """An Endpoint and a Door that remember, and fail or hang as they are told."""

    instance_id = 1
    in_flight = 0

    def __init__(self) -> None:
        self.registered = True
        self.shut = False
        self.calls: list[str] = []
        self.trouble: dict[str, Exception | float] = {}

    async def register_model(self, card: ModelCard) -> None:
        raise NotImplementedError

    async def deregister(self) -> None:
        await self._call("withdraw")
        self.registered = False

    async def register(self) -> None:
        await self._call("restore")
        self.registered = True

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        match self.trouble.get(name):
            case Exception() as error:
                raise error
            case float(delay):
                await asyncio.sleep(delay)

    def pause(self) -> None:
        self.shut = True

    def resume(self) -> None:
        self.shut = False

    async def idle(self, timeout_s: float) -> bool:
        return True


def presence_of(register: Register) -> DiscoveryRegistration:
    return DiscoveryRegistration(register, register, limit_s=0.05)


def test_an_ordered_absence_leaves_discovery_and_shuts_the_door() -> None:
    async def body() -> None:
        register = Register()
        registration = presence_of(register)
        await registration.deregister(COMMANDED)
        assert (register.registered, register.shut, registration.registered) == (False, True, False)
        await registration.register(COMMANDED)
        assert (register.registered, register.shut, registration.registered) == (True, False, True)

    run_bounded(body())


def test_an_illness_leaves_the_door_open() -> None:
    async def body() -> None:
        register = Register()
        registration = presence_of(register)
        await registration.deregister(UNHEALTHY)
        assert (register.registered, register.shut, registration.registered) == (False, False, False)

    run_bounded(body())


@pytest.mark.parametrize("first", [UNHEALTHY, COMMANDED])
def test_a_worker_comes_back_when_the_last_reason_is_gone(first: DeregisterReason) -> None:
    async def body() -> None:
        register = Register()
        registration = presence_of(register)
        second = COMMANDED if first is UNHEALTHY else UNHEALTHY
        for reason in (first, second, first):
            await registration.deregister(reason)
        await registration.register(first)
        assert not register.registered
        await registration.register(first)
        assert not register.registered
        await registration.register(second)
        assert register.registered
        assert register.calls == ["withdraw", "restore"]

    run_bounded(body())


@pytest.mark.parametrize("trouble", [RuntimeError("no etcd"), 3600.0])
def test_a_worker_that_cannot_leave_is_as_it_was(trouble: Exception | float) -> None:
    async def body() -> None:
        register = Register()
        register.trouble["withdraw"] = trouble
        registration = presence_of(register)
        with pytest.raises(PeerLost, match="nothing was done"):
            await registration.deregister(COMMANDED)
        assert (register.registered, register.shut, registration.registered) == (True, False, True)

    run_bounded(body())


def test_a_worker_that_cannot_come_back_is_of_no_use() -> None:
    async def body() -> None:
        register = Register()
        registration = presence_of(register)
        await registration.deregister(COMMANDED)
        register.trouble["restore"] = RuntimeError("no etcd")
        with pytest.raises(EngineDead, match="come back into discovery"):
            await registration.register(COMMANDED)

    run_bounded(body())


def test_nothing_brings_a_worker_back_that_has_left_for_good() -> None:
    async def body() -> None:
        register = Register()
        registration = presence_of(register)
        await registration.deregister(COMMANDED)
        await registration.aclose()
        await registration.register(COMMANDED)
        assert not register.registered
        assert "restore" not in register.calls

    run_bounded(body())


def test_leaving_for_good_waits_for_a_return_on_its_way() -> None:
    async def body() -> None:
        register = Register()
        registration = presence_of(register)
        await registration.deregister(COMMANDED)
        register.trouble["restore"] = 0.01
        assert not registration.registered
        back = asyncio.create_task(registration.register(COMMANDED))
        await asyncio.sleep(0)
        await registration.aclose()
        await back
        assert not register.registered

    run_bounded(body())
