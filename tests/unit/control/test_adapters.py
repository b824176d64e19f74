"""LoRA adapters: one that is loaded is a model that clients can name; frontends never name one that is not loaded."""

import msgspec
import pytest

from baton.control.controller import Controller
from baton.control.discovery import DiscoveryRegistration
from baton.errors import BatonError, EngineDead, InvalidRequest, PeerLost
from baton.ports.engine import Capabilities
from baton.protocol.commands import LoadLora, Outcome, UnloadLora
from baton.request.gate import Gate
from baton.testing import ScriptedEngine, run_bounded
from baton.testing.fakes import SCRIPTED_INFO, ControlStep
from tests.unit.control.test_discovery import FlakyEndpoint
from tests.unit.control.worker_harness import running_worker

LOADED = Outcome(message="loaded", adapters=("fine",))
UNLOADED = Outcome(message="unloaded", adapters=())
LOAD = LoadLora(name="fine", path="/adapters/fine")
UNLOAD = UnloadLora(name="fine")


class Adapters:
    """A controller of an engine with adapters, on a flaky endpoint."""

    def __init__(self, *control: ControlStep) -> None:
        self.endpoint = FlakyEndpoint()
        self.engine = ScriptedEngine(capabilities=Capabilities(lora=True), control=control)
        self.registration = DiscoveryRegistration(self.endpoint, timeout_s=0.05)
        self.failures: list[BatonError] = []
        self.controller = Controller(self.engine, self.registration, Gate(8), 10.0, self.failures.append)


def test_a_loaded_adapter_is_registered_and_an_unloaded_one_is_not() -> None:
    async def body() -> None:
        async with running_worker(LOADED, UNLOADED) as worker:
            assert (await worker.ok("lora/load", {"name": "fine", "path": "/adapters/fine"}))["adapters"] == ["fine"]
            assert worker.endpoint.adapters == {"fine"}
            await worker.ok("lora/unload", {"name": "fine"})
            assert worker.endpoint.adapters == set()

    run_bounded(body())


def test_adapters_that_the_engine_starts_with_are_registered() -> None:
    async def body() -> None:
        async with running_worker(info=msgspec.structs.replace(SCRIPTED_INFO, adapters=("given", "other"))) as worker:
            assert worker.endpoint.adapters == {"given", "other"}

    run_bounded(body())


def test_an_adapter_that_the_engine_refuses_is_not_registered() -> None:
    async def body() -> None:
        worker = Adapters(InvalidRequest("path: not a directory"))
        with pytest.raises(InvalidRequest):
            await worker.controller.execute(LOAD)
        assert worker.endpoint.calls == []

    run_bounded(body())


@pytest.mark.parametrize("trouble", [OSError("no connection"), 10.0], ids=["fails", "hangs"])
def test_an_adapter_that_cannot_be_registered_is_unloaded_again(trouble: Exception | float) -> None:
    async def body() -> None:
        worker = Adapters(LOADED, UNLOADED)
        worker.endpoint.trouble["register_adapter"] = trouble
        with pytest.raises(PeerLost, match="nothing was done"):
            await worker.controller.execute(LOAD)
        assert worker.engine.commands == [LOAD, UNLOAD]
        assert worker.failures == []

    run_bounded(body())


def test_an_adapter_is_deregistered_before_it_is_unloaded() -> None:
    async def body() -> None:
        worker = Adapters(LOADED, InvalidRequest("name: in use"), UNLOADED)
        await worker.controller.execute(LOAD)
        with pytest.raises(InvalidRequest):
            await worker.controller.execute(UNLOAD)
        assert worker.endpoint.adapters == {"fine"}, "what is still loaded is still registered"
        worker.endpoint.trouble["deregister_adapter"] = OSError("no connection")
        with pytest.raises(PeerLost, match="nothing was done"):
            await worker.controller.execute(UNLOAD)
        assert worker.engine.commands == [LOAD, UNLOAD], "the engine was not asked"
        worker.endpoint.trouble.clear()
        await worker.controller.execute(UNLOAD)
        assert worker.endpoint.adapters == set()

    run_bounded(body())


def test_a_worker_that_can_neither_register_nor_unload_an_adapter_restarts() -> None:
    async def body() -> None:
        worker = Adapters(LOADED, InvalidRequest("name: in use"))
        worker.endpoint.trouble["register_adapter"] = OSError("no connection")
        with pytest.raises(EngineDead):
            await worker.controller.execute(LOAD)
        assert len(worker.failures) == 1

    run_bounded(body())
