"""Control: an operator's access to one worker. Its callers know neither the engine nor discovery."""

from typing import Protocol

import msgspec

from baton.ports.engine import Capabilities
from baton.protocol.commands import Command, Outcome


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a worker.

    `paused`: an operator's pause holds. `released`: memory tags that are released. `command`: the command that is being
    executed. `registered`: discovery has the worker. `in_flight`: requests that run. `capabilities`: those of the
    engine.
    """

    weight_version: str
    paused: bool
    released: tuple[str, ...]
    command: str | None
    registered: bool
    in_flight: int
    capabilities: Capabilities


class Control(Protocol):
    """Takes commands from any number of callers in one event loop, and executes them one at a time."""

    def status(self) -> Status:
        """Return the state of the worker, also while a command is being executed."""

    async def execute(self, command: Command) -> Outcome:
        """Execute `command`, after those that were received before it.

        Raises Unsupported, InvalidRequest, Conflict, EngineFailed, PeerLost or Draining, and then nothing has changed;
        EngineStalled or EngineDead, and then the worker ends.
        """
