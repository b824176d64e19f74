"""What a global router goes by: pools, the grids that choose among them, and what to do when a choice fails.

A plan is valid by construction of `files.py`; nothing here checks it again.
"""

from typing import Literal

import msgspec

from baton.router.grid import Grid

PartName = Literal["prefill", "decode", "aggregated"]


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that are alike, reached at one endpoint. A smaller `priority` is a faster pool.

    One that holds `queue_limit` requests without a first output gets no more; None is no limit.
    """

    name: str
    path: str
    priority: int
    queue_limit: int | None = None
    spread: Literal["round-robin", "kv"] = "round-robin"
    block_size: int = 16


class Override(msgspec.Struct, frozen=True):
    """Requests with a priority from `low` to `high`, both included, go to `pool` whatever the grid says."""

    low: int
    high: int
    pool: int


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The pools of one kind of work, and how one is chosen."""

    pools: tuple[Pool, ...]
    grid: Grid
    overrides: tuple[Override, ...] = ()


class Disaggregated(msgspec.Struct, frozen=True, tag="disaggregated"):
    """Prefill and decode are chosen each for itself."""

    prefill: Part
    decode: Part


class Aggregated(msgspec.Struct, frozen=True, tag="aggregated"):
    """One pool does a whole request."""

    aggregated: Part


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request may go when its pool fails before the first output: to faster pools, and then to all others."""

    faster: bool = False
    others: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides where a request goes. Targets are for requests that give none."""

    mode: Disaggregated | Aggregated
    ttft_ms: float | None = None
    itl_ms: float | None = None
    retry: Retry = Retry()
    adaptive: bool = False

    @property
    def parts(self) -> dict[PartName, Part]:
        """The parts, by name."""
        match self.mode:
            case Disaggregated(prefill, decode):
                return {"prefill": prefill, "decode": decode}
            case Aggregated(aggregated):
                return {"aggregated": aggregated}
