"""What the global router tells: decisions, retries, skipped pools, latency against targets, and how the pools are."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.ports.observer import RequestRecord
from baton.router.pools import MEASURED, PartRoutes, PoolState

log = logging.getLogger("baton.request")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10)
_POOL = ["part", "pool"]


class RouterMetrics:
    """An Observer (see `ports/observer.py`) of requests, with counts of what was decided for them."""

    def __init__(self, parts: Callable[[], Iterable[PartRoutes]]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "baton_requests", "Requests by the state they ended in", ["role", "state"], registry=registry
        )
        self._errors = Counter("baton_errors", "Requests that failed, by code", ["code"], registry=registry)
        self._seconds = Histogram(
            "baton_request_seconds", "Admission to the end", ["role"], buckets=_SECONDS, registry=registry
        )
        self._decisions = Counter(
            "baton_router_decisions", "Requests sent to a pool, and why to it", [*_POOL, "reason"], registry=registry
        )
        self._retries = Counter(
            "baton_router_retries",
            "Tries that failed before an output",
            [*_POOL, "code"],
            registry=registry,
        )
        self._skips = Counter(
            "baton_router_skipped", "Pools passed over for a request, and why", [*_POOL, "reason"], registry=registry
        )
        self._latency = Histogram(
            "baton_router_latency_seconds",
            "First output, and time between tokens, by pool",
            [*_POOL, "kind"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._ratio = Histogram(
            "baton_router_target_ratio",
            "Latency as a share of what was asked for",
            [*_POOL, "kind"],
            buckets=_RATIOS,
            registry=registry,
        )
        self._reloads = Counter(
            "baton_router_reloads", "Changes of the plan, by outcome", ["outcome"], registry=registry
        )
        registry.register(_Pools(parts))

    def finished(self, record: RequestRecord) -> None:
        """See `Observer.finished`."""
        self._requests.labels(record.role, record.state.value).inc()
        if record.error_code is not None:
            self._errors.labels(record.error_code).inc()
        self._seconds.labels(record.role).observe(record.duration_s)
        log.debug(
            "%s %s %s error=%s prompt=%d completion=%d duration_ms=%.1f trace=%s client=%s",
            record.request_id,
            record.role,
            record.state.value,
            record.error_code or "-",
            record.prompt_tokens,
            record.completion_tokens,
            record.duration_s * 1000,
            record.trace_id or "-",
            record.client_id or "-",
        )

    def decided(self, part: str, pool: str, reason: str) -> None:
        """A request goes to `pool`."""
        self._decisions.labels(part, pool, reason).inc()

    def skipped(self, part: str, pool: str, reason: str) -> None:
        """A pool was passed over."""
        self._skips.labels(part, pool, reason).inc()

    def retried(self, part: str, pool: str, code: str) -> None:
        """A try at `pool` failed, and the request goes on."""
        self._retries.labels(part, pool, code).inc()

    def measured(self, part: str, pool: str, kind: str, milliseconds: float, target: float | None) -> None:
        """A request was this fast; `target` is what was asked of it."""
        self._latency.labels(part, pool, kind).observe(milliseconds / 1000)
        if target:
            self._ratio.labels(part, pool, kind).observe(milliseconds / target)

    def reloaded(self, outcome: str) -> None:
        """The plan has changed, or was refused."""
        self._reloads.labels(outcome).inc()

    def render(self) -> str:
        """Return everything as Prometheus text."""
        return generate_latest(self.registry).decode()


class _Pools(Collector):
    """The pools as they are when somebody looks."""

    def __init__(self, parts: Callable[[], Iterable[PartRoutes]]) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        instances = GaugeMetricFamily("baton_router_pool_instances", "Workers of a pool in discovery", labels=_POOL)
        inside = GaugeMetricFamily("baton_router_pool_in_flight", "Requests of this router in a pool", labels=_POOL)
        waiting = GaugeMetricFamily("baton_router_pool_waiting", "Those of them without a first output", labels=_POOL)
        latency = GaugeMetricFamily(
            "baton_router_pool_latency_seconds", "What nine in ten recent requests have kept", labels=[*_POOL, "kind"]
        )
        meets = GaugeMetricFamily(
            "baton_router_pool_meets", "1 if a pool is as fast as its tightest bucket asks", labels=[*_POOL, "kind"]
        )
        for routes in self._parts():
            for state in routes.states:
                labels = [routes.name, state.pool.name]
                instances.add_metric(labels, len(state.client.instances()))
                inside.add_metric(labels, state.in_flight)
                waiting.add_metric(labels, state.waiting)
                for kind, seconds in _latencies(routes.name, state).items():
                    latency.add_metric([*labels, kind], seconds)
            for state, kind, limit_ms in routes.buckets():
                labels = [routes.name, state.pool.name, kind.removesuffix("_ms")]
                meets.add_metric(labels, state.meets({kind: limit_ms}))
        yield from (instances, inside, waiting, latency, meets)


def _latencies(part: str, state: PoolState) -> Mapping[str, float]:
    known = {name.removesuffix("_ms"): state.measured(name) for name in MEASURED[part]}
    return {name: value / 1000 for name, value in known.items() if value is not None}
