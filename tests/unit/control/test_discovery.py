"""Presence: a worker is in discovery while there is no reason against it, whatever the order they come and go in."""

import asyncio

import pytest

from baton.control.discovery import Absence, Presence
from baton.errors import EngineDead, PeerLost
from baton.ports.runtime import ModelCard
from baton.testing import run_bounded

ILL, ORDERED = Absence.ILL, Absence.ORDERED


class Register:
    """An Endpoint and a Door that remember, and fail or hang as they are told."""

    instance_id = 1
    in_flight = 0

    def __init__(self) -> None:
        self.listed = True
        self.shut = False
        self.calls: list[str] = []
        self.trouble: dict[str, Exception | float] = {}

    async def advertise(self, card: ModelCard) -> None:
        raise NotImplementedError

    async def withdraw(self) -> None:
        await self._call("withdraw")
        self.listed = False

    async def restore(self) -> None:
        await self._call("restore")
        self.listed = True

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


def presence_of(register: Register) -> Presence:
    return Presence(register, register, limit_s=0.05)


def test_an_ordered_absence_leaves_discovery_and_shuts_the_door() -> None:
    async def body() -> None:
        register = Register()
        presence = presence_of(register)
        await presence.leave(ORDERED)
        assert (register.listed, register.shut, presence.listed) == (False, True, False)
        await presence.come_back(ORDERED)
        assert (register.listed, register.shut, presence.listed) == (True, False, True)

    run_bounded(body())


def test_an_illness_leaves_the_door_open() -> None:
    async def body() -> None:
        register = Register()
        presence = presence_of(register)
        await presence.leave(ILL)
        assert (register.listed, register.shut, presence.listed) == (False, False, False)

    run_bounded(body())


@pytest.mark.parametrize("first", [ILL, ORDERED])
def test_a_worker_comes_back_when_the_last_reason_is_gone(first: Absence) -> None:
    async def body() -> None:
        register = Register()
        presence = presence_of(register)
        second = ORDERED if first is ILL else ILL
        for reason in (first, second, first):
            await presence.leave(reason)
        await presence.come_back(first)
        assert not register.listed
        await presence.come_back(first)
        assert not register.listed
        await presence.come_back(second)
        assert register.listed
        assert register.calls == ["withdraw", "restore"]

    run_bounded(body())


@pytest.mark.parametrize("trouble", [RuntimeError("no etcd"), 3600.0])
def test_a_worker_that_cannot_leave_is_as_it_was(trouble: Exception | float) -> None:
    async def body() -> None:
        register = Register()
        register.trouble["withdraw"] = trouble
        presence = presence_of(register)
        with pytest.raises(PeerLost, match="nothing was done"):
            await presence.leave(ORDERED)
        assert (register.listed, register.shut, presence.listed) == (True, False, True)

    run_bounded(body())


def test_a_worker_that_cannot_come_back_is_of_no_use() -> None:
    async def body() -> None:
        register = Register()
        presence = presence_of(register)
        await presence.leave(ORDERED)
        register.trouble["restore"] = RuntimeError("no etcd")
        with pytest.raises(EngineDead, match="come back into discovery"):
            await presence.come_back(ORDERED)

    run_bounded(body())


def test_nothing_brings_a_worker_back_that_has_left_for_good() -> None:
    async def body() -> None:
        register = Register()
        presence = presence_of(register)
        await presence.leave(ORDERED)
        await presence.aclose()
        await presence.come_back(ORDERED)
        assert not register.listed
        assert "restore" not in register.calls

    run_bounded(body())


def test_leaving_for_good_waits_for_a_return_on_its_way() -> None:
    async def body() -> None:
        register = Register()
        presence = presence_of(register)
        await presence.leave(ORDERED)
        register.trouble["restore"] = 0.01
        assert not presence.listed
        back = asyncio.create_task(presence.come_back(ORDERED))
        await asyncio.sleep(0)
        await presence.aclose()
        await back
        assert not register.listed

    run_bounded(body())
