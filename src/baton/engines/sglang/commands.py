"""Operators' commands to SGLang, by kind. `control/` has checked that the engine supports them.

SGLang dies of some commands that it cannot execute; those are refused before they are sent.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.engines.sglang.loras import Loras
from baton.engines.sglang.pause import PauseCommands
from baton.engines.sglang.records import Records
from baton.engines.sglang.requests import Requests
from baton.engines.sglang.sglang_types import Manager
from baton.engines.sglang.weight_commands import WeightCommands
from baton.ports.engine import Capabilities
from baton.protocol.commands import (
    ClearCache,
    Command,
    Continue,
    JoinGroup,
    LeaveGroup,
    ListLoras,
    LoadLora,
    Outcome,
    Pause,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    UnloadLora,
    UpdateWeights,
)


class Commands:
    """Executes commands on one engine, one at a time. A command that raises has changed nothing."""

    def __init__(
        self,
        manager: Manager,
        requests: Requests,
        can: Capabilities,
        model_dir: Path,
        values: Mapping[str, Any],
        group_backend: str,
    ) -> None:
        device = str(values["device"])
        if group_backend == "auto":
            group_backend = "gloo" if device == "cpu" else "nccl"
        self._pause = PauseCommands(manager, requests, "retract" in can.pause_modes)
        self._weights = WeightCommands(manager, self._pause, model_dir, int(values["tp_size"]), group_backend)
        self._records = Records(manager, device)
        self._loras = Loras(manager)

    async def execute(self, command: Command) -> Outcome:
        """See `Engine.execute`."""
        match command:
            case Pause() | Continue() | ClearCache() | ReleaseMemory() | ResumeMemory():
                return await self._pause.execute(command)
            case UpdateWeights() | SetWeightVersion() | JoinGroup() | LeaveGroup():
                return await self._weights.execute(command)
            case LoadLora() | UnloadLora() | ListLoras():
                return await self._loras.execute(command)
            case _:
                return await self._records.execute(command)
