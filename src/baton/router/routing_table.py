"""The plan in force with its pools, and the way from one plan to the next."""

import asyncio
from collections.abc import Iterable

from baton.ports.runtime import Runtime
from baton.router.plan import PartName, Plan, Pool
from baton.router.pools import PartRoutes, PoolState


class Routes:
    """What the router goes by now. A pool that stays in the plan, or comes back, keeps its client and measurements."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._parts: dict[PartName, PartRoutes] = {}
        self._known: dict[tuple[object, ...], PoolState] = {}  # the runtime does not let go of a client either

    def part(self, name: PartName) -> PartRoutes:
        """Return a part as the plan in force has it."""
        return self._parts[name]

    def parts(self) -> Iterable[PartRoutes]:
        """Return all parts."""
        return self._parts.values()

    async def adopt(self, plan: Plan) -> None:
        """Go by `plan` from now on; requests that run go on by the one they began with. On error nothing changes."""
        found = {name: [await self._state(name, pool) for pool in part.pools] for name, part in plan.parts.items()}
        for name, part in plan.parts.items():
            for state, pool in zip(found[name], part.pools, strict=True):
                state.pool = pool
        self._parts = {name: PartRoutes(name, plan, states) for name, states in found.items()}

    async def _state(self, name: PartName, pool: Pool) -> PoolState:
        key = (name, pool.path, pool.spread, pool.block_size)
        if key not in self._known:
            client = await self._runtime.client(pool.path, pool.block_size if pool.spread == "kv" else None)
            self._known[key] = PoolState(pool, client, asyncio.get_running_loop().time)
        return self._known[key]
