"""Scripted pools in a memory runtime, and a router over them."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from baton.errors import BatonError
from baton.ports.runtime import Context, Service, Wire
from baton.request.gate import Gate
from baton.request.tracker import RequestLimits, RequestTracker
from baton.router.forward import Forwarder
from baton.router.grid import Axis, Grid
from baton.router.metrics import RouterMetrics
from baton.router.plan import Aggregated, Override, Plan, Pool, Retry, RolePlan
from baton.router.routing_table import RoutingTable
from baton.testing.fakes import RecordingObserver
from baton.testing.memory_runtime import MemoryContext, MemoryEndpoint, MemoryRuntime

REQUEST: Wire = {"token_ids": [1, 2, 3], "unknown": {"kept": [1, None]}, "routing": {"new_key": 1}}
LAST: Wire = {"token_ids": [9], "index": 0, "finish_reason": "stop", "engine_data": {"kept": True}}
FASTER = Retry(faster=True)
Replies = list[Wire | BatonError | Callable[[], object]]


class FakePool:
    """Workers behind one path. Each call replays `replies` and is recorded."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.replies: Replies = [{"token_ids": [5], "index": 0}, LAST]
        self.requests: list[Wire] = []
        self.contexts: list[Context] = []
        self.cancelled = 0

    async def serve(self, request: Wire, context: Context) -> AsyncGenerator[Wire, None]:
        """Replay the replies; raise errors and call functions among them."""
        self.requests.append(request)
        self.contexts.append(context)
        context.on_cancel(self._on_cancel)
        for item in self.replies:
            if isinstance(item, BatonError):
                raise item
            if callable(item):
                result = item()
                if asyncio.iscoroutine(result):
                    await result
                continue
            yield item

    def _on_cancel(self) -> None:
        self.cancelled += 1


class Fleet:
    """An aggregated router over pools by prompt length: bucket 0 selects the first pool, bucket 1 the second."""

    def __init__(self, *names: str, request_timeout_s: float = 600.0) -> None:
        self.runtime = MemoryRuntime()
        self.pools = {name: FakePool(name) for name in names}
        self.endpoints: dict[str, MemoryEndpoint] = {}
        self.routing = RoutingTable(self.runtime)
        self.metrics = RouterMetrics(self.routing.routers)
        self.observer = RecordingObserver()
        tracker = RequestTracker(
            Gate(100),
            RequestLimits(request_timeout_s=request_timeout_s),
            self.observer,
            "aggregated",
            lambda error: None,
        )
        self.forwarder = Forwarder(lambda: self.routing.router("aggregated"), tracker, self.metrics)

    def plan(self, retry: Retry = FASTER, queue_limit: int | None = None, adaptive: bool = False) -> Plan:
        """Return a plan of all pools, the fastest first."""
        pools = tuple(
            Pool(name=name, path=f"{name}.worker.generate", priority=place, queue_limit=queue_limit)
            for place, name in enumerate(self.pools)
        )
        axes = (Axis("length", 0, 20, len(pools)), Axis("ttft_ms", 0, 1000, 1))
        role_plan = RolePlan(pools=pools, grid=Grid(axes, tuple(range(len(pools)))), overrides=(Override(7, 9, 0),))
        return Plan(mode=Aggregated(role_plan), retry=retry, adaptive=adaptive)

    async def open(self, plan: Plan | None = None) -> "Fleet":
        """Serve every pool and adopt the plan."""
        await self.runtime.start()
        for name, pool in self.pools.items():
            service: Service[Wire, Wire] = Service(pool.serve, _as_is, lambda wire: wire)
            self.endpoints[name] = await self.runtime.serve(f"{name}.worker.generate", service)
        await self.routing.adopt(plan or self.plan())
        return self

    async def send(self, request: Wire = REQUEST, context: Context | None = None) -> list[Wire]:
        """Send a request through the router; return its chunks."""
        return [chunk async for chunk in self.forwarder.generate(request, context or MemoryContext("r"))]

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric, 0 if it has no sample."""
        return self.metrics.registry.get_sample_value(name, {"role": "aggregated", **labels}) or 0.0


def _as_is(wire: object) -> Wire:
    assert isinstance(wire, dict)
    return wire
