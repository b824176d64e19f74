"""What an operator may ask of SGLang: what it cannot do is refused, and the rest goes to who can do it.

SGLang answers some impossible orders by dying. Those are refused before it hears of them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.engine_kit.capability_check import refuse_unsupported
from baton.engines.sglang.sglang_types import Manager
from baton.engines.sglang.loras import Loras
from baton.engines.sglang.pause import Holding
from baton.engines.sglang.records import Records
from baton.engines.sglang.requests import Requests
from baton.engines.sglang.weight_commands import WeightCommands
from baton.errors import Unsupported
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


class Controls:
    """The operator's hand on one engine. One verb at a time; a refusal has changed nothing."""

    def __init__(
        self, manager: Manager, requests: Requests, can: Capabilities, model_dir: Path, values: Mapping[str, Any]
    ) -> None:
        device = str(values["device"])
        self._can = can
        self._holding = Holding(manager, requests, "retract" in can.pause_modes)
        self._weights = WeightCommands(manager, self._holding, model_dir, int(values["tp_size"]), device)
        self._records = Records(manager, device)
        self._loras = Loras(manager)

    async def execute(self, command: Command) -> Outcome:
        """See `Engine.execute`."""
        refuse_unsupported(command, self._can)
        if isinstance(command, Pause) and command.mode not in self._can.pause_modes:
            raise Unsupported(f"mode: SGLang does not {command.mode} by itself")
        match command:
            case Pause() | Continue() | ClearCache() | ReleaseMemory() | ResumeMemory():
                return await self._holding.execute(command)
            case UpdateWeights() | SetWeightVersion() | JoinGroup() | LeaveGroup():
                return await self._weights.execute(command)
            case LoadLora() | UnloadLora() | ListLoras():
                return await self._loras.execute(command)
            case _:
                return await self._records.execute(command)
