"""What an operator may ask of SGLang: what it cannot do is refused, and the rest goes to who can do it.

SGLang answers some impossible orders by dying. Those are refused before it hears of them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.engine_kit.capability_check import refuse_unsupported
from baton.engines.sglang.foreign import Manager
from baton.engines.sglang.loras import Loras
from baton.engines.sglang.pause import Holding
from baton.engines.sglang.records import Records
from baton.engines.sglang.requests import Requests
from baton.engines.sglang.weight_commands import WeightOrders
from baton.errors import Unsupported
from baton.ports.engine import Capabilities
from baton.protocol.commands import (
    ClearCache,
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
    Verb,
)


class Controls:
    """The operator's hand on one engine. One verb at a time; a refusal has changed nothing."""

    def __init__(
        self, manager: Manager, requests: Requests, can: Capabilities, model_dir: Path, values: Mapping[str, Any]
    ) -> None:
        device = str(values["device"])
        self._can = can
        self._holding = Holding(manager, requests, "retract" in can.pause_modes)
        self._weights = WeightOrders(manager, self._holding, model_dir, int(values["tp_size"]), device)
        self._records = Records(manager, device)
        self._loras = Loras(manager)

    async def obey(self, verb: Verb) -> Outcome:
        """See `Engine.control`."""
        refuse_unsupported(verb, self._can)
        if isinstance(verb, Pause) and verb.mode not in self._can.pause_modes:
            raise Unsupported(f"mode: SGLang does not {verb.mode} by itself")
        match verb:
            case Pause() | Continue() | ClearCache() | ReleaseMemory() | ResumeMemory():
                return await self._holding.obey(verb)
            case UpdateWeights() | SetWeightVersion() | JoinGroup() | LeaveGroup():
                return await self._weights.obey(verb)
            case LoadLora() | UnloadLora() | ListLoras():
                return await self._loras.obey(verb)
            case _:
                return await self._records.obey(verb)
