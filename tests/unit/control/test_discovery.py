"""Registration: a worker is in discovery while no reason is against it, in whatever order reasons come and go."""

import asyncio

import pytest

from baton.control.controller import Controller
from baton.control.discovery import DiscoveryRegistration
from baton.errors import BatonError, EngineDead, PeerLost
from baton.ports.engine import Capabilities
from baton.ports.runtime import ModelCard
from baton.protocol.commands import Continue, Outcome, Pause
from baton.protocol.events import Reading
from baton.request.gate import Gate, GateState
from baton.testing import ScriptedEngine, run_bounded

DONE = Outcome(message="done")


class FlakyEndpoint:
    """An Endpoint that records its calls, and fails or hangs as `trouble` says."""

    instance_id = 1

    def __init__(self) -> None:
        self.registered = True
        self.adapters: set[str] = set()
        self.calls: list[str] = []
        self.trouble: dict[str, Exception | float] = {}

    @property
    def is_registered(self) -> bool:
        return self.registered

    async def register_model(self, card: ModelCard) -> None:
        raise NotImplementedError

    async def register_adapter(self, name: str) -> None:
        await self._call("register_adapter")
        self.adapters.add(name)

    async def deregister_adapter(self, name: str) -> None:
        await self._call("deregister_adapter")
        self.adapters.discard(name)

    def publish(self, reading: Reading) -> None:
        raise NotImplementedError

    async def deregister(self) -> None:
        await self._call("deregister")
        self.registered = False

    async def register(self) -> None:
        await self._call("register")
        self.registered = True

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        match self.trouble.get(name):
            case Exception() as error:
                raise error
            case float(delay):
                await asyncio.sleep(delay)


class Registration:
    """A controller of an engine that only pauses, on a flaky endpoint."""

    def __init__(self) -> None:
        self.endpoint = FlakyEndpoint()
        self.gate = Gate(8)
        self.failures: list[BatonError] = []
        can = Capabilities(pause_modes=frozenset({"keep"}))
        engine = ScriptedEngine(capabilities=can, control=[DONE] * 8)
        registration = DiscoveryRegistration(self.endpoint, timeout_s=0.05)
        self.controller = Controller(engine, registration, self.gate, 10.0, self.failures.append)

    async def deregister(self, reason: str) -> None:
        if reason == "unhealthy":
            await self.controller.set_healthy(False)
        else:
            await self.controller.execute(Pause())

    async def register(self, reason: str) -> None:
        if reason == "unhealthy":
            await self.controller.set_healthy(True)
        else:
            await self.controller.execute(Continue())

    @property
    def seen(self) -> tuple[bool, bool, GateState]:
        """What discovery has, what the controller reports, and the gate."""
        return self.endpoint.registered, self.controller.registered, self.gate.state


def test_a_command_deregisters_and_pauses_the_gate() -> None:
    async def body() -> None:
        worker = Registration()
        await worker.deregister("command")
        assert worker.seen == (False, False, GateState.PAUSED)
        await worker.register("command")
        assert worker.seen == (True, True, GateState.OPEN)

    run_bounded(body())


def test_an_unhealthy_worker_deregisters_and_its_gate_stays_open() -> None:
    async def body() -> None:
        worker = Registration()
        await worker.deregister("unhealthy")
        assert worker.seen == (False, False, GateState.OPEN)

    run_bounded(body())


@pytest.mark.parametrize("first", ["unhealthy", "command"])
def test_a_worker_registers_when_the_last_reason_is_gone(first: str) -> None:
    async def body() -> None:
        worker = Registration()
        second = "command" if first == "unhealthy" else "unhealthy"
        for reason in (first, second, first):
            await worker.deregister(reason)
        await worker.register(first)
        assert not worker.endpoint.registered
        await worker.register(first)
        assert not worker.endpoint.registered
        await worker.register(second)
        assert worker.endpoint.registered
        assert worker.endpoint.calls == ["deregister", "register"]

    run_bounded(body())


@pytest.mark.parametrize("trouble", [RuntimeError("no etcd"), 3600.0])
def test_a_worker_that_cannot_leave_discovery_stays_registered(trouble: Exception | float) -> None:
    async def body() -> None:
        worker = Registration()
        worker.endpoint.trouble["deregister"] = trouble
        with pytest.raises(PeerLost, match="nothing was done"):
            await worker.deregister("command")
        assert worker.seen == (True, True, GateState.OPEN)
        assert worker.failures == []

    run_bounded(body())


def test_a_worker_that_cannot_register_again_ends() -> None:
    async def body() -> None:
        worker = Registration()
        await worker.deregister("command")
        worker.endpoint.trouble["register"] = RuntimeError("no etcd")
        with pytest.raises(EngineDead, match="register in discovery again"):
            await worker.register("command")
        [failure] = worker.failures
        assert isinstance(failure, EngineDead)

    run_bounded(body())


def test_nothing_registers_a_worker_that_has_left_for_good() -> None:
    async def body() -> None:
        worker = Registration()
        await worker.deregister("unhealthy")
        await worker.controller.aclose()
        await worker.register("unhealthy")
        assert not worker.endpoint.registered
        assert "register" not in worker.endpoint.calls

    run_bounded(body())


def test_leaving_for_good_waits_for_a_registration_that_is_under_way() -> None:
    async def body() -> None:
        worker = Registration()
        await worker.deregister("unhealthy")
        worker.endpoint.trouble["register"] = 0.01
        assert not worker.controller.registered
        registering = asyncio.create_task(worker.register("unhealthy"))
        await asyncio.sleep(0)
        await worker.controller.aclose()
        await registering
        assert not worker.endpoint.registered
        assert not worker.controller.registered

    run_bounded(body())
