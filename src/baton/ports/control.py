"""Control: what an operator reaches of a worker. Whoever carries the orders here knows neither engine nor discovery."""

from typing import Protocol

import msgspec

from baton.ports.engine import Capabilities
from baton.protocol.commands import Command, Outcome


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker stands with its orders.

    `released` are the memory tags that are given back, `doing` is the order in hand, and `listed` tells whether
    discovery has the worker.
    """

    weight_version: str
    paused: bool
    released: tuple[str, ...]
    command: str | None
    registered: bool
    in_flight: int
    capabilities: Capabilities


class Control(Protocol):
    """Takes orders, from any number of callers in one event loop, and carries them out one at a time."""

    def status(self) -> Status:
        """Return where the worker stands; answers while an order is being carried out."""

    async def execute(self, command: Command) -> Outcome:
        """Have `verb` done, after those that came before it.

        Raises Unsupported, InvalidRequest, Conflict, EngineFailed, PeerLost or Draining, and then nothing has changed;
        EngineStalled or EngineDead, and then the worker ends.
        """
