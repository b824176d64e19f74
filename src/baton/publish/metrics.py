"""Prometheus metrics of one worker, and its one log line for each request."""

import logging

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from baton.ports.observer import RequestRecord
from baton.protocol.events import LoadSnapshot
from baton.protocol.lifecycle import TERMINAL

log = logging.getLogger("baton.request")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class WorkerMetrics:
    """An Observer (see `ports/observer.py`) with the worker's gauges beside it."""

    def __init__(self, role: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "baton_requests", "Requests by the state they ended in", ["role", "state"], registry=self.registry
        )
        self._errors = Counter("baton_errors", "Requests that failed, by code", ["code"], registry=self.registry)
        self._tokens = Counter("baton_tokens", "Tokens by kind", ["kind"], registry=self.registry)
        self._first = Histogram(
            "baton_first_output_seconds",
            "Admission to first output",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._duration = Histogram(
            "baton_request_seconds", "Admission to the end", buckets=_SECONDS, registry=self.registry
        )
        self.in_flight = Gauge("baton_in_flight", "Requests inside the gate", registry=self.registry)
        self.healthy = Gauge("baton_healthy", "1 while canary and watchdog are content", registry=self.registry)
        self._running = Gauge("baton_engine_running", "Requests the engine runs", registry=self.registry)
        self._waiting = Gauge("baton_engine_waiting", "Requests that wait in the engine", registry=self.registry)
        self._blocks = Gauge("baton_engine_blocks", "KV blocks by use", ["use"], registry=self.registry)
        self._by_state = {
            (name, state): self._requests.labels(name, state.value) for name in (role, "canary") for state in TERMINAL
        }
        self._prompt, self._cached, self._completion = (
            self._tokens.labels(kind) for kind in ("prompt", "cached", "completion")
        )

    def finished(self, record: RequestRecord) -> None:
        """See `Observer.finished`."""
        self._by_state[record.role, record.state].inc()
        if record.error_code is not None:
            self._errors.labels(record.error_code).inc()
        if record.role != "canary":  # tokens and times are those of clients
            self._prompt.inc(record.prompt_tokens)
            self._cached.inc(record.cached_tokens)
            self._completion.inc(record.completion_tokens)
            if record.first_output_s is not None:
                self._first.observe(record.first_output_s)
            self._duration.observe(record.duration_s)
        log.log(
            logging.DEBUG if record.role == "canary" else logging.INFO,
            "%s %s %s error=%s prompt=%d cached=%d completion=%d duration_ms=%.1f trace=%s client=%s",
            record.request_id,
            record.role,
            record.state.value,
            record.error_code or "-",
            record.prompt_tokens,
            record.cached_tokens,
            record.completion_tokens,
            record.duration_s * 1000,
            record.trace_id or "-",
            record.client_id or "-",
        )

    def load(self, snapshot: LoadSnapshot) -> None:
        """Show the engine's load."""
        self._running.set(snapshot.running)
        self._waiting.set(snapshot.waiting)
        self._blocks.labels("used").set(snapshot.used_blocks)
        self._blocks.labels("free").set(snapshot.total_blocks - snapshot.used_blocks)

    def render(self) -> str:
        """Return everything as Prometheus text."""
        return generate_latest(self.registry).decode()
