"""Metrics of the global router: decisions, retries, skipped pools, latency against targets, state of the pools."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

from prometheus_client import generate_latest

from baton.metrics.families import SECONDS, Counted, Family, Label, Observed, Scraped
from baton.metrics.process import process_registry
from baton.metrics.worker_families import CODE, DURATION, ERRORS, IN_FLIGHT, REQUESTS
from baton.ports.observer import RequestRecord
from baton.router.plan import PoolRole
from baton.router.pools import MEASURED, PoolState
from baton.router.routing_table import RoleRouter

log = logging.getLogger("baton.request")

_RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
_POOL = (Label("role", ("aggregated", "prefill", "decode")), Label("pool", source="pools of the topology file"))
_KIND = Label("kind", ("ttft", "itl"))


def _family(name: str, kind: Literal["counter", "gauge"], unit: str, meaning: str, *labels: Label) -> Family:
    return Family(name=name, kind=kind, unit=unit, meaning=meaning, processes=("router",), labels=labels)


DECISIONS = _family(
    "baton_router_decisions_total",
    "counter",
    "requests",
    "Requests sent to a pool: by the grid, by an override, as the next of a pool that was skipped (fallback), or again"
    " after a failure (retry)",
    *_POOL,
    Label("reason", ("grid", "override", "fallback", "retry")),
)
RETRIES = _family(
    "baton_router_retries_total",
    "counter",
    "attempts",
    "Attempts that failed in a pool before the first output and may be retried, by error code",
    *_POOL,
    CODE,
)
SKIPPED = _family(
    "baton_router_skipped_pools_total",
    "counter",
    "pools",
    "Pools skipped for a request: without a worker (empty), with a full queue, or missing the targets (slow)",
    *_POOL,
    Label("reason", ("empty", "queue", "slow")),
)
RELOADS = _family(
    "baton_router_reloads_total",
    "counter",
    "reloads",
    "Changed topology files, by outcome",
    Label("outcome", ("adopted", "refused")),
)
LATENCY = Family(
    name="baton_router_latency_seconds",
    kind="histogram",
    unit="seconds",
    meaning="Time to first token (ttft) and mean time between tokens (itl) of requests, by pool",
    processes=("router",),
    labels=(*_POOL, _KIND),
    buckets=SECONDS,
)
TARGET_RATIO = Family(
    name="baton_router_target_ratio",
    kind="histogram",
    unit="ratio",
    meaning="Latency divided by its target: above 1 the target was missed",
    processes=("router",),
    labels=(*_POOL, _KIND),
    buckets=_RATIOS,
)
POOL_WORKERS = _family("baton_router_pool_workers", "gauge", "workers", "Workers of a pool in discovery", *_POOL)
POOL_IN_FLIGHT = _family(
    "baton_router_pool_requests_in_flight", "gauge", "requests", "Requests of this router in a pool", *_POOL
)
POOL_WAITING = _family(
    "baton_router_pool_waiting_requests",
    "gauge",
    "requests",
    "Requests of this router in a pool without output yet",
    *_POOL,
)
POOL_LATENCY = _family(
    "baton_router_pool_latency_seconds",
    "gauge",
    "seconds",
    "90th percentile of recent requests in a pool, which selects pools",
    *_POOL,
    _KIND,
)
POOL_MEETS = _family(
    "baton_router_pool_meets_target",
    "gauge",
    "0 or 1",
    "1 if a pool meets the tightest target that selects it",
    *_POOL,
    _KIND,
)
FAMILIES = (
    DECISIONS,
    RETRIES,
    SKIPPED,
    LATENCY,
    TARGET_RATIO,
    POOL_WORKERS,
    POOL_IN_FLIGHT,
    POOL_WAITING,
    POOL_LATENCY,
    POOL_MEETS,
    RELOADS,
)

Sample = tuple[tuple[str, ...], float]


class RouterMetrics:
    """An Observer (see `ports/observer.py`) that also counts routing decisions. Used in the event loop."""

    def __init__(self, routers: Callable[[], Iterable[RoleRouter]], model: str = "") -> None:
        self.registry = registry = process_registry("router", model)
        self._requests = Counted(REQUESTS, registry)
        self._errors = Counted(ERRORS, registry)
        self._seconds = Observed(DURATION, registry)
        self.in_flight = Counted(IN_FLIGHT, registry)
        self._decisions = Counted(DECISIONS, registry)
        self._retries = Counted(RETRIES, registry)
        self._skips = Counted(SKIPPED, registry)
        self._latency = Observed(LATENCY, registry)
        self._ratio = Observed(TARGET_RATIO, registry)
        self._reloads = Counted(RELOADS, registry)
        pools = _Pools(routers)
        Scraped(POOL_WORKERS, registry, lambda: pools.each(lambda state: len(state.client.instances())))
        Scraped(POOL_IN_FLIGHT, registry, lambda: pools.each(lambda state: state.in_flight))
        Scraped(POOL_WAITING, registry, lambda: pools.each(lambda state: state.waiting))
        Scraped(POOL_LATENCY, registry, pools.latencies)
        Scraped(POOL_MEETS, registry, pools.meeting)

    def finished(self, record: RequestRecord) -> None:
        """See `Observer.finished`."""
        self._requests.labels(record.role, record.state.value).inc()
        if record.error_code is not None:
            self._errors.labels(record.error_code).inc()
        self._seconds.labels(record.role).observe(record.duration_s)
        log.debug(
            "%s %s %s error=%s prompt=%d completion=%d duration_ms=%.1f model=%s trace=%s client=%s",
            record.request_id,
            record.role,
            record.state.value,
            record.error_code or "-",
            record.prompt_tokens,
            record.completion_tokens,
            record.duration_s * 1000,
            record.model or "-",
            record.trace_id or "-",
            record.client_id or "-",
            extra={"request_id": record.request_id, "trace_id": record.trace_id},
        )

    def decided(self, role: str, pool: str, reason: str) -> None:
        """Count a request sent to `pool`."""
        self._decisions.labels(role, pool, reason).inc()

    def skipped(self, role: str, pool: str, reason: str) -> None:
        """Count a skipped pool."""
        self._skips.labels(role, pool, reason).inc()

    def retried(self, role: str, pool: str, code: str) -> None:
        """Count an attempt that failed in `pool` and may be retried."""
        self._retries.labels(role, pool, code).inc()

    def measured(self, role: str, pool: str, kind: str, milliseconds: float, target: float | None) -> None:
        """Record a latency, and its ratio to `target` if there is one."""
        self._latency.labels(role, pool, kind).observe(milliseconds / 1000)
        if target:
            self._ratio.labels(role, pool, kind).observe(milliseconds / target)

    def reloaded(self, outcome: str) -> None:
        """Count a reload of the topology file."""
        self._reloads.labels(outcome).inc()

    def render(self) -> str:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry).decode()


class _Pools:
    """The state of the pools at the time of the scrape."""

    def __init__(self, routers: Callable[[], Iterable[RoleRouter]]) -> None:
        self._routers = routers

    def each(self, value: Callable[[PoolState], float]) -> Iterator[Sample]:
        """Yield a value of each pool."""
        for router in self._routers():
            for state in router.states:
                yield (router.role, state.pool.name), value(state)

    def latencies(self) -> Iterator[Sample]:
        """Yield the latencies that are known."""
        for router in self._routers():
            for state in router.states:
                for kind, seconds in _latencies(router.role, state).items():
                    yield (router.role, state.pool.name, kind), seconds

    def meeting(self) -> Iterator[Sample]:
        """Yield whether pools meet the targets that select them."""
        for router in self._routers():
            for state, kind, limit_ms in router.tightest_targets():
                yield (router.role, state.pool.name, kind.removesuffix("_ms")), state.meets({kind: limit_ms})


def _latencies(role: PoolRole, state: PoolState) -> Mapping[str, float]:
    known = {name.removesuffix("_ms"): state.measured(name) for name in MEASURED[role]}
    return {name: value / 1000 for name, value in known.items() if value is not None}
