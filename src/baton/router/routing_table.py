"""The routing table: the plan in force with the state of its pools, and the pools that each request tries."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence

from baton.errors import Overloaded, PeerLost
from baton.ports.runtime import Runtime
from baton.router.plan import Plan, Pool, PoolRole, RolePlan
from baton.router.pools import MEASURED, PoolState
from baton.router.request_view import RequestView
from baton.router.select import Candidate, Choice, Skip, rank_candidates, retry_order, select_pool

_SKIP_REASONS: dict[Skip, str] = {"empty": "no worker", "queue": "queue full", "slow": "misses the targets"}


class Route:
    """The pools that one request may try. The state of the pools is checked before each attempt."""

    def __init__(
        self, choice: Choice, targets: Mapping[str, float], order: Sequence[PoolState], adaptive: bool
    ) -> None:
        self.choice = choice
        self.targets = targets
        self.skipped: dict[PoolState, Skip] = {}
        self._left = list(order)
        self._adaptive = adaptive

    def next(self) -> PoolState | None:
        """Return the best pool that has not been tried; None if no pool can accept the request."""
        if not self._left:
            return None
        first = self._left[0]
        if first.unavailable() is None and (not self._adaptive or first.meets(self.targets)):
            return self._left.pop(0)
        candidates = [Candidate(n, pool.unavailable(), pool.meets(self.targets)) for n, pool in enumerate(self._left)]
        order, skipped = rank_candidates(candidates, self._adaptive)
        self.skipped.update((self._left[n], why) for n, why in skipped)
        return self._left.pop(order[0]) if order else None

    def refusal(self) -> Overloaded | PeerLost:
        """Return the error for a request that no pool could accept."""
        reasons = ", ".join(f"{state.pool.name} ({_SKIP_REASONS[why]})" for state, why in self.skipped.items())
        error = Overloaded if "queue" in self.skipped.values() else PeerLost
        return error(f"no pool can accept the request: {reasons}")


class RoleRouter:
    """Routes the requests of one role. Replaced as a whole when the plan changes."""

    def __init__(self, role: PoolRole, plan: Plan, states: Sequence[PoolState]) -> None:
        self.role = role
        self.plan = plan
        self.role_plan: RolePlan = plan.roles[role]
        self.states = states
        pools = self.role_plan.pools
        self._orders = [[states[n] for n in retry_order(pools, selected, plan.retry)] for selected in range(len(pools))]
        self._time_axes = [
            (index, axis) for index, axis in enumerate(self.role_plan.grid.axes) if axis.name in MEASURED[role]
        ]

    def route(self, request: RequestView) -> Route:
        """Select the pools for a request. Without a target of its own, the upper bound of its bucket is the target."""
        choice = select_pool(self.role_plan, request.point, request.priority)
        targets: dict[str, float] = {}
        for index, axis in self._time_axes:
            target: float | None = getattr(request.point, axis.name)
            targets[axis.name] = target if target is not None else axis.bounds(choice.cell[index])[1]
        return Route(choice, targets, self._orders[choice.pool], self.plan.adaptive)

    def tightest_targets(self) -> Iterator[tuple[PoolState, str, float]]:
        """Iterate over pools and time axes, with the upper bound of the lowest bucket that selects the pool."""
        grid = self.role_plan.grid
        tightest: dict[tuple[int, str], float] = {}
        for index, pool in enumerate(grid.cells):
            for axis_index, axis in self._time_axes:
                stride = 1
                for later in grid.axes[axis_index + 1 :]:
                    stride *= later.buckets
                limit = axis.bounds(index // stride % axis.buckets)[1]
                key = (pool, axis.name)
                tightest[key] = min(limit, tightest.get(key, limit))
        for (pool, name), limit in tightest.items():
            yield self.states[pool], name, limit


class RoutingTable:
    """The routers of the plan in force. A pool that stays in the plan, or is added again, keeps its client and latency.

    Clients are never dropped, because the runtime does not release them either.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._routers: dict[PoolRole, RoleRouter] = {}
        self._pools: dict[tuple[object, ...], PoolState] = {}

    def router(self, role: PoolRole) -> RoleRouter:
        """Return the router of a role."""
        return self._routers[role]

    def routers(self) -> Iterable[RoleRouter]:
        """Return the routers of all roles."""
        return self._routers.values()

    async def adopt(self, plan: Plan) -> None:
        """Route new requests by `plan`; running requests keep the plan they started with. On error nothing changes."""
        states = {role: [await self._state(role, pool) for pool in each.pools] for role, each in plan.roles.items()}
        for role, each in plan.roles.items():
            for state, pool in zip(states[role], each.pools, strict=True):
                state.pool = pool
        self._routers = {role: RoleRouter(role, plan, role_states) for role, role_states in states.items()}

    async def _state(self, role: PoolRole, pool: Pool) -> PoolState:
        key = (role, pool.path, pool.spread, pool.block_size)
        if key not in self._pools:
            client = await self._runtime.client(pool.path, pool.block_size if pool.spread == "kv" else None)
            self._pools[key] = PoolState(pool, client, asyncio.get_running_loop().time)
        return self._pools[key]
