"""Updates of weights, with an SGLang that keeps count of its weight-update session."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engines.sglang.compat import Dialect
from baton.engines.sglang.params import Setting
from baton.engines.sglang.pause import PauseCommands
from baton.engines.sglang.requests import Requests
from baton.engines.sglang.weight_commands import WeightCommands
from baton.errors import EngineDead
from baton.protocol.commands import FromGroup, JoinGroup, TensorSpec, UpdateWeights
from baton.testing.bounded import run_bounded

pytestmark = pytest.mark.usefixtures("io_struct")

SOURCE = FromGroup(group="trainer", tensors=(TensorSpec(name="w", dtype="float32", shape=(1,)),), timeout_s=0.05)


class Manager:
    """SGLang's front half; `receive` is what becomes of the weights that a trainer sends."""

    def __init__(self) -> None:
        self.session = False
        self.receive: Any = None

    async def init_weights_update_group(self, request: Any, _: None) -> tuple[bool, str]:
        return True, ""

    async def begin_weight_update(self, request: Any, _: None) -> tuple[bool, str]:
        begun, self.session = not self.session, True
        return begun, "a weight-update session is already open"

    async def end_weight_update(self, request: Any, _: None) -> tuple[bool, str]:
        self.session = False
        return True, ""

    async def update_weights_from_distributed(self, request: Any, _: None) -> tuple[bool, str]:
        await self.receive()
        return True, "updated"


async def joined(tmp_path: Path) -> tuple[Manager, WeightCommands]:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    manager: Any = Manager()
    requests = Requests(manager, SimpleNamespace, Setting(dialect=Dialect(version="0.5.23")))
    commands = WeightCommands(manager, PauseCommands(manager, requests, retracts=False), tmp_path, 1, "gloo")
    await commands.execute(JoinGroup(group="trainer", host="127.0.0.1", port=9, rank=1, size=2))
    return manager, commands


def test_an_update_that_raises_ends_its_session_so_that_the_next_is_taken(tmp_path: Path) -> None:
    async def body() -> None:
        manager, commands = await joined(tmp_path)

        async def fail() -> None:
            raise RuntimeError("lost")

        manager.receive = fail
        with pytest.raises(RuntimeError, match="lost"):
            await commands.execute(UpdateWeights(source=SOURCE, version="1"))
        assert not manager.session

        async def arrive() -> None:
            pass

        manager.receive = arrive
        outcome = await commands.execute(UpdateWeights(source=SOURCE, version="2"))
        assert outcome.weight_version == "2"

    run_bounded(body())


def test_a_session_whose_trainer_keeps_sglang_waiting_is_left_to_the_restart(tmp_path: Path) -> None:
    async def body() -> None:
        manager, commands = await joined(tmp_path)
        manager.receive = asyncio.Event().wait
        with pytest.raises(EngineDead, match="restarts"):
            await commands.execute(UpdateWeights(source=SOURCE, version="1"))
        assert manager.session, "its scheduler would not answer"

    run_bounded(body())
