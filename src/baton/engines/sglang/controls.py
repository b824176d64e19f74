"""What an operator may ask of SGLang: what it cannot do is refused, and the rest goes to who can do it.

SGLang answers some impossible orders by dying. Those are refused before it hears of them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.engines.sglang.foreign import Manager
from baton.engines.sglang.holding import Holding
from baton.engines.sglang.loras import Loras
from baton.engines.sglang.records import Records
from baton.engines.sglang.requests import Requests
from baton.engines.sglang.weight_orders import SOURCES, WeightOrders
from baton.errors import Unsupported
from baton.ports.engine import Capabilities
from baton.protocol.control import (
    ClearCache,
    Continue,
    DumpExpertRecord,
    JoinGroup,
    LeaveGroup,
    ListLoras,
    LoadLora,
    Outcome,
    Pause,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    StartExpertRecord,
    StopExpertRecord,
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
        if (problem := unsupported(verb, self._can)) is not None:
            raise Unsupported(problem)
        match verb:
            case Pause() | Continue() | ClearCache() | ReleaseMemory() | ResumeMemory():
                return await self._holding.obey(verb)
            case UpdateWeights() | SetWeightVersion() | JoinGroup() | LeaveGroup():
                return await self._weights.obey(verb)
            case LoadLora() | UnloadLora() | ListLoras():
                return await self._loras.obey(verb)
            case _:
                return await self._records.obey(verb)


def unsupported(verb: Verb, can: Capabilities) -> str | None:
    """Return what is wrong with a verb that an engine with these capabilities cannot do."""
    match verb:
        case Pause() if verb.mode not in can.pause_modes:
            return f"mode: this engine does not pause so, but by {' or '.join(sorted(can.pause_modes))}"
        case ReleaseMemory() | ResumeMemory() if unknown := sorted(set(verb.tags) - can.memory_tags):
            has = f"it has {', '.join(sorted(can.memory_tags))}" if can.memory_tags else "it has no memory saver"
            return f"tags: this engine cannot give {unknown[0]!r} back; {has}"
        case UpdateWeights() if (way := SOURCES[type(verb.source)]) not in can.weight_sources:
            return f"source: this engine does not take weights by {way}"
        case JoinGroup() | LeaveGroup() if "group" not in can.weight_sources:
            return "group: this engine does not take weights through a group"
        case StartExpertRecord() | StopExpertRecord() | DumpExpertRecord() if not can.expert_records:
            return "this engine records no experts; start it with a recorder"
        case LoadLora() | UnloadLora() | ListLoras() if not can.lora:
            return "this engine has no adapters; start it with --enable-lora"
        case _:
            return None
