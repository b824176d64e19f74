"""The commands of the control API: the one table of paths and methods. The server, its OpenAPI document and `baton ctl`
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
"""For weights in the request itself. Larger models use a directory, shared memory or a process group."""


class CommandPath(NamedTuple):
    """One path under `/control/`. Without a command it only reports the state, and does not wait for the engine."""

    path: str
    method: Literal["GET", "POST"]
    command: type[Command] | None
    reply: type[Outcome] | type[Status] = Outcome
    description: str = ""
    body_bytes: int = BODY_BYTES

    @property
    def summary(self) -> str:
        """One sentence: the first of the command's docstring."""
        text = " ".join((inspect.getdoc(self.command) or "").split()) if self.command is not None else self.description
        return text.split(". ")[0].rstrip(".")


COMMAND_PATHS = (
    CommandPath("status", "GET", None, Status, description="Return the state of the worker"),
    CommandPath("memory/release", "POST", ReleaseMemory),
    CommandPath("memory/resume", "POST", ResumeMemory),
    CommandPath("pause", "POST", Pause),
    CommandPath("continue", "POST", Continue),
    CommandPath("weights/update", "POST", UpdateWeights, body_bytes=TENSOR_BODY_BYTES),
    CommandPath("weights/version", "GET", None, description="Return the version of the current weights"),
    CommandPath("weights/version", "POST", SetWeightVersion),
    CommandPath("weights/group/join", "POST", JoinGroup),
    CommandPath("weights/group/leave", "POST", LeaveGroup),
    CommandPath("cache/clear", "POST", ClearCache),
    CommandPath("profile/start", "POST", StartProfile),
    CommandPath("profile/stop", "POST", StopProfile),
    CommandPath("experts/record/start", "POST", StartExpertRecord),
    CommandPath("experts/record/stop", "POST", StopExpertRecord),
    CommandPath("experts/record/dump", "POST", DumpExpertRecord),
    CommandPath("lora/load", "POST", LoadLora),
    CommandPath("lora/unload", "POST", UnloadLora),
    CommandPath("lora/list", "GET", ListLoras),
)
