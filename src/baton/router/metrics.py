"""Metrics of the global router: decisions, retries, skipped pools, latency against targets, state of the pools."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.ports.observer import RequestRecord
from baton.router.plan import PoolRole
from baton.router.pools import MEASURED, PoolState
from baton.router.routing_table import RoleRouter

log = logging.getLogger("baton.request")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10)
_POOL = ["role", "pool"]


class RouterMetrics:
    """An Observer (see `ports/observer.py`) that also counts routing decisions."""

    def __init__(self, routers: Callable[[], Iterable[RoleRouter]]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self._requests = Counter("baton_requests", "Requests by terminal state", ["role", "state"], registry=registry)
        self._errors = Counter("baton_errors", "Failed requests by error code", ["code"], registry=registry)
        self._seconds = Histogram(
            "baton_request_seconds",
            "Admission to terminal state",
            ["role"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._decisions = Counter(
            "baton_router_decisions", "Requests sent to a pool, by reason", [*_POOL, "reason"], registry=registry
        )
        self._retries = Counter(
            "baton_router_retries",
            "Attempts that failed before the first output",
            [*_POOL, "code"],
            registry=registry,
        )
        self._skips = Counter(
            "baton_router_skipped", "Pools skipped for a request, by reason", [*_POOL, "reason"], registry=registry
        )
        self._latency = Histogram(
            "baton_router_latency_seconds",
            "Time to first token (ttft) and between tokens (itl), by pool",
            [*_POOL, "kind"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._ratio = Histogram(
            "baton_router_target_ratio",
            "Latency divided by its target",
            [*_POOL, "kind"],
            buckets=_RATIOS,
            registry=registry,
        )
        self._reloads = Counter(
            "baton_router_reloads", "Reloads of the topology file, by outcome", ["outcome"], registry=registry
        )
        registry.register(_PoolCollector(routers))

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


class _PoolCollector(Collector):
    """The state of the pools at the time of the scrape."""

    def __init__(self, routers: Callable[[], Iterable[RoleRouter]]) -> None:
        self._routers = routers

    def collect(self) -> Iterator[Metric]:
        instances = GaugeMetricFamily("baton_router_pool_instances", "Workers of a pool in discovery", labels=_POOL)
        in_flight = GaugeMetricFamily("baton_router_pool_in_flight", "Requests of this router in a pool", labels=_POOL)
        waiting = GaugeMetricFamily("baton_router_pool_waiting", "Requests in a pool without output yet", labels=_POOL)
        latency = GaugeMetricFamily(
            "baton_router_pool_latency_seconds", "90th percentile of recent requests", labels=[*_POOL, "kind"]
        )
        meets = GaugeMetricFamily(
            "baton_router_pool_meets", "1 if a pool meets the tightest target that selects it", labels=[*_POOL, "kind"]
        )
        for router in self._routers():
            for state in router.states:
                labels = [router.role, state.pool.name]
                instances.add_metric(labels, len(state.client.instances()))
                in_flight.add_metric(labels, state.in_flight)
                waiting.add_metric(labels, state.waiting)
                for kind, seconds in _latencies(router.role, state).items():
                    latency.add_metric([*labels, kind], seconds)
            for state, kind, limit_ms in router.tightest_targets():
                labels = [router.role, state.pool.name, kind.removesuffix("_ms")]
                meets.add_metric(labels, state.meets({kind: limit_ms}))
        yield from (instances, in_flight, waiting, latency, meets)


def _latencies(role: PoolRole, state: PoolState) -> Mapping[str, float]:
    known = {name.removesuffix("_ms"): state.measured(name) for name in MEASURED[role]}
    return {name: value / 1000 for name, value in known.items() if value is not None}
