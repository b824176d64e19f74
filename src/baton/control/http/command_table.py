"""The operator's routes: the one table of paths, methods and verbs. The server, its OpenAPI document and `baton ctl`
read it.
"""

import inspect
from typing import Literal, NamedTuple

from baton.ports.control import Status
from baton.protocol.commands import (
    ClearCache,
    Command,
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
    StartProfile,
    StopExpertRecord,
    StopProfile,
    UnloadLora,
    UpdateWeights,
)

PREFIX = "/control/"
BODY_BYTES = 1 << 20
TENSOR_BODY_BYTES = 1 << 28
"""For weights in the request itself; more goes by a disk, shared memory or a group."""


class Route(NamedTuple):
    """One route under `/control/`. Without a verb it only tells how things are, whatever the engine does."""

    path: str
    method: Literal["GET", "POST"]
    command: type[Command] | None
    reply: type[Outcome] | type[Status] = Outcome
    about: str = ""
    body_bytes: int = BODY_BYTES

    @property
    def summary(self) -> str:
        """What it is for, in one sentence: the first of its verb."""
        text = " ".join((inspect.getdoc(self.command) or "").split()) if self.command is not None else self.about
        return text.split(". ")[0].rstrip(".")


ROUTES = (
    Route("status", "GET", None, Status, about="Tell where the worker stands with its orders"),
    Route("memory/release", "POST", ReleaseMemory),
    Route("memory/resume", "POST", ResumeMemory),
    Route("pause", "POST", Pause),
    Route("continue", "POST", Continue),
    Route("weights/update", "POST", UpdateWeights, body_bytes=TENSOR_BODY_BYTES),
    Route("weights/version", "GET", None, about="Tell what the weights in place are called"),
    Route("weights/version", "POST", SetWeightVersion),
    Route("weights/group/join", "POST", JoinGroup),
    Route("weights/group/leave", "POST", LeaveGroup),
    Route("cache/clear", "POST", ClearCache),
    Route("profile/start", "POST", StartProfile),
    Route("profile/stop", "POST", StopProfile),
    Route("experts/record/start", "POST", StartExpertRecord),
    Route("experts/record/stop", "POST", StopExpertRecord),
    Route("experts/record/dump", "POST", DumpExpertRecord),
    Route("lora/load", "POST", LoadLora),
    Route("lora/unload", "POST", UnloadLora),
    Route("lora/list", "GET", ListLoras),
)
