"""The routing plan: the pools of each role, the grid that selects among them, and the retry policy.

`topology_file.py` builds only valid plans; nothing here checks them again.
"""

from typing import Literal

import msgspec

from baton.router.grid import Grid

PoolRole = Literal["prefill", "decode", "aggregated"]


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Identical workers behind one endpoint. A smaller `priority` is a faster pool.

    A pool with `queue_limit` requests that have no output yet accepts no more; None is no limit.
    """

    name: str
    path: str
    priority: int
    queue_limit: int | None = None
    spread: Literal["round-robin", "kv"] = "round-robin"
    block_size: int = 16


class Override(msgspec.Struct, frozen=True):
    """Requests with a priority from `low` to `high`, inclusive, go to `pool` whatever the grid selects."""

    low: int
    high: int
    pool: int


class RolePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The pools of one role, and the rules that select one."""

    pools: tuple[Pool, ...]
    grid: Grid
    overrides: tuple[Override, ...] = ()


class Disaggregated(msgspec.Struct, frozen=True, tag="disaggregated"):
    """Prefill and decode pools, selected independently."""

    prefill: RolePlan
    decode: RolePlan


class Aggregated(msgspec.Struct, frozen=True, tag="aggregated"):
    """One pool runs the whole request."""

    aggregated: RolePlan


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """Which pools retry a request that failed before its first output: faster ones, then all others."""

    faster: bool = False
    others: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides where a request goes. The targets are defaults for requests without their own."""

    mode: Disaggregated | Aggregated
    ttft_ms: float | None = None
    itl_ms: float | None = None
    retry: Retry = Retry()
    adaptive: bool = False

    def with_default_targets(self, ttft_ms: float | None, itl_ms: float | None) -> "Plan":
        """Return the plan with these defaults where they are not None."""
        return msgspec.structs.replace(
            self,
            ttft_ms=self.ttft_ms if ttft_ms is None else ttft_ms,
            itl_ms=self.itl_ms if itl_ms is None else itl_ms,
        )

    @property
    def roles(self) -> dict[PoolRole, RolePlan]:
        """The plan of each role."""
        match self.mode:
            case Disaggregated(prefill, decode):
                return {"prefill": prefill, "decode": decode}
            case Aggregated(aggregated):
                return {"aggregated": aggregated}
