"""The pools of one part as the router sees them now, and which of them a request tries."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from baton.errors import Overloaded, PeerLost
from baton.ports.runtime import Client
from baton.router.latency import Window
from baton.router.plan import Part, PartName, Plan, Pool
from baton.router.request_view import Ask
from baton.router.retry import Candidate, Skip, choose, retry_order
from baton.router.select import Choice, select_pool

SHARE = 0.9
MEASURED = {"prefill": ("ttft_ms",), "decode": ("itl_ms",), "aggregated": ("ttft_ms", "itl_ms")}


class PoolState:
    """One pool: its client, what of ours is inside, and how fast it has been."""

    def __init__(self, pool: Pool, client: Client, clock: Callable[[], float]) -> None:
        self.pool = pool
        self.client = client
        self.in_flight = 0
        self.waiting = 0
        self.windows = {"ttft_ms": Window(clock), "itl_ms": Window(clock)}

    def unfit(self) -> Skip | None:
        """Return why the pool can take no request now. Workers that drain are not in discovery any more."""
        if self.pool.queue_limit is not None and self.waiting >= self.pool.queue_limit:
            return "queue"
        return None if self.client.instances() else "empty"

    def measured(self, name: str) -> float | None:
        """Return the latency that nine in ten recent requests have kept, in milliseconds."""
        return self.windows[name].quantile(SHARE)

    def meets(self, targets: Mapping[str, float]) -> bool:
        """Whether the pool keeps `targets`, as far as is known: one that nobody has measured may."""
        for name, target in targets.items():
            measured = self.measured(name)
            if measured is not None and measured > target:
                return False
        return True


class Route:
    """Where one request may go, decided anew before each try."""

    def __init__(
        self, choice: Choice, targets: Mapping[str, float], order: Sequence[PoolState], adaptive: bool
    ) -> None:
        self.choice = choice
        self.targets = targets
        self.skipped: dict[PoolState, Skip] = {}
        self._left = list(order)
        self._adaptive = adaptive

    def next(self) -> PoolState | None:
        """Return the best pool that has not been tried; None if there is none."""
        if not self._left:
            return None
        first = self._left[0]
        if first.unfit() is None and (not self._adaptive or first.meets(self.targets)):
            return self._left.pop(0)
        candidates = [Candidate(n, state.unfit(), state.meets(self.targets)) for n, state in enumerate(self._left)]
        order, skipped = choose(candidates, self._adaptive)
        self.skipped.update((self._left[n], why) for n, why in skipped)
        return self._left.pop(order[0]) if order else None

    def refusal(self) -> Overloaded | PeerLost:
        """Return what to raise when there was no pool to try."""
        reasons = ", ".join(f"{state.pool.name} ({_WORDS[why]})" for state, why in self.skipped.items())
        if "queue" in self.skipped.values():
            return Overloaded(f"no pool can take the request: {reasons}")
        return PeerLost(f"no pool can take the request: {reasons}")


_WORDS: dict[Skip, str] = {"empty": "no worker", "queue": "full", "slow": "slower than asked"}


class PartRoutes:
    """One part of a plan with its pools. Replaced as a whole when the plan changes."""

    def __init__(self, name: PartName, plan: Plan, states: Sequence[PoolState]) -> None:
        self.name = name
        self.plan = plan
        self.part: Part = plan.parts[name]
        self.states = states
        pools = self.part.pools
        self._orders = [[states[n] for n in retry_order(pools, selected, plan.retry)] for selected in range(len(pools))]
        self._time_axes = [
            (place, axis) for place, axis in enumerate(self.part.grid.axes) if axis.name in MEASURED[name]
        ]

    def route(self, ask: Ask) -> Route:
        """Decide for a request. Its targets are its own, or else what the buckets that it lies in allow."""
        choice = select_pool(self.part, ask.point, ask.priority)
        targets: dict[str, float] = {}
        for place, axis in self._time_axes:
            given: float | None = getattr(ask.point, axis.name)
            targets[axis.name] = given if given is not None else axis.bounds(choice.cell[place])[1]
        return Route(choice, targets, self._orders[choice.pool], self.plan.adaptive)

    def buckets(self) -> Iterator[tuple[PoolState, str, float]]:
        """Iterate over what is asked of each pool: the pool, the axis, and the most that its tightest bucket allows."""
        grid = self.part.grid
        tightest: dict[tuple[int, str], float] = {}
        for place, pool in enumerate(grid.cells):
            for axis_place, axis in self._time_axes:
                below = 1
                for later in grid.axes[axis_place + 1 :]:
                    below *= later.buckets
                limit = axis.bounds(place // below % axis.buckets)[1]
                key = (pool, axis.name)
                tightest[key] = min(limit, tightest.get(key, limit))
        for (pool, name), limit in tightest.items():
            yield self.states[pool], name, limit
