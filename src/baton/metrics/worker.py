"""Prometheus metrics of one worker, and its one log line for each request."""

import logging
from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.ports.observer import RequestRecord
from baton.protocol.events import LoadSnapshot
from baton.protocol.lifecycle import TERMINAL

log = logging.getLogger("baton.request")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_COMMAND_SECONDS = (0.001, 0.01, 0.1, 1, 5, 10, 30, 60, 300, 600)


class RoomCounts(Protocol):
    """Counts of a prefill worker's rooms. Read from any thread."""

    @property
    def open(self) -> Mapping[str, int]:
        """How many rooms are open, by state."""

    @property
    def ended(self) -> Mapping[str, int]:
        """How many rooms have ended, by outcome."""


class TrafficCounts(Protocol):
    """The KV that a decode worker has fetched, by transport. Read from any thread."""

    @property
    def bytes_by_transport(self) -> Mapping[str, float]:
        """How many bytes."""

    @property
    def seconds_by_transport(self) -> Mapping[str, float]:
        """How many seconds, over all requests."""


class EmbeddingCounts(Protocol):
    """Counts of a worker's embedding cache. Read from any thread."""

    @property
    def hits(self) -> int:
        """How many items of requests were there."""

    @property
    def misses(self) -> int:
        """How many were encoded or fetched."""

    @property
    def entries(self) -> int:
        """How many items are there."""

    @property
    def pinned(self) -> int:
        """How many of them requests use, or are offered to other workers."""

    @property
    def used_bytes(self) -> int:
        """How much memory they take."""


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
        self.healthy = Gauge("baton_healthy", "1 while canary and watchdog find no fault", registry=self.registry)
        self.model_load_seconds = Gauge(
            "baton_model_load_seconds", "Seconds that the engine took to load the model", registry=self.registry
        )
        rank = ["dp_rank"]
        self._running = Gauge("baton_engine_running", "Requests running in the engine", rank, registry=self.registry)
        self._waiting = Gauge("baton_engine_waiting", "Requests waiting in the engine", rank, registry=self.registry)
        self._blocks = Gauge("baton_engine_blocks", "KV blocks by use", ["use", *rank], registry=self.registry)
        self._commands = Counter(
            "baton_commands",
            "Commands of operators, by outcome",
            ["command", "outcome"],
            registry=self.registry,
        )
        self._command_seconds = Histogram(
            "baton_command_seconds",
            "Duration of operators' commands",
            ["command"],
            buckets=_COMMAND_SECONDS,
            registry=self.registry,
        )
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
        if record.role != "canary":  # tokens and times count clients only
            self._prompt.inc(record.prompt_tokens)
            self._cached.inc(record.cached_tokens)
            self._completion.inc(record.completion_tokens)
            if record.first_output_s is not None:
                self._first.observe(record.first_output_s)
            self._duration.observe(record.duration_s)
        log.log(
            logging.DEBUG if record.role == "canary" else logging.INFO,
            "%s %s %s error=%s prompt=%d cached=%d completion=%d duration_ms=%.1f model=%s trace=%s client=%s",
            record.request_id,
            record.role,
            record.state.value,
            record.error_code or "-",
            record.prompt_tokens,
            record.cached_tokens,
            record.completion_tokens,
            record.duration_s * 1000,
            record.model or "-",
            record.trace_id or "-",
            record.client_id or "-",
        )

    def load(self, snapshot: LoadSnapshot) -> None:
        """Show the load of one data-parallel rank of the engine."""
        rank = snapshot.dp_rank
        self._running.labels(rank).set(snapshot.running)
        self._waiting.labels(rank).set(snapshot.waiting)
        self._blocks.labels("used", rank).set(snapshot.used_blocks)
        self._blocks.labels("free", rank).set(snapshot.total_blocks - snapshot.used_blocks)

    def count_command(self, command: str, outcome: str, seconds: float) -> None:
        """Count an operator's command."""
        self._commands.labels(command, outcome).inc()
        self._command_seconds.labels(command).observe(seconds)

    def show_transfers(self, rooms: RoomCounts | None, traffic: TrafficCounts | None) -> None:
        """Export the KV handoffs of this worker, where its role has any."""
        if rooms is not None:
            self.registry.register(_Rooms(rooms))
        if traffic is not None:
            self.registry.register(_Traffic(traffic))

    def show_embeddings(self, store: EmbeddingCounts) -> None:
        """Export the embedding cache of this worker, where it has one."""
        self.registry.register(_Embeddings(store))

    def render(self) -> str:
        """Return everything as Prometheus text."""
        return generate_latest(self.registry).decode()


class _Rooms(Collector):
    def __init__(self, counts: RoomCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        rooms = GaugeMetricFamily(
            "baton_rooms", "Rooms with KV or encoded media for other workers, by state", labels=["state"]
        )
        for state, number in self._counts.open.items():
            rooms.add_metric([state], number)
        ended = CounterMetricFamily("baton_rooms", "Rooms that have ended, by outcome", labels=["end"])
        for end, number in self._counts.ended.items():
            ended.add_metric([end], number)
        yield from (rooms, ended)


class _Embeddings(Collector):
    def __init__(self, counts: EmbeddingCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        lookups = CounterMetricFamily(
            "baton_media_cache", "Media of requests that were in the embedding cache, or not", labels=["result"]
        )
        lookups.add_metric(["hit"], counts.hits)
        lookups.add_metric(["miss"], counts.misses)
        yield lookups
        yield GaugeMetricFamily("baton_media_cache_bytes", "Embeddings in memory", value=counts.used_bytes)
        items = GaugeMetricFamily("baton_media_cache_items", "Encoded media in memory, by use", labels=["use"])
        items.add_metric(["pinned"], counts.pinned)
        items.add_metric(["cached"], counts.entries - counts.pinned)
        yield items


class _Traffic(Collector):
    def __init__(self, counts: TrafficCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        size = CounterMetricFamily(
            "baton_transfer_bytes", "KV and embeddings fetched from other workers", labels=["transport"]
        )
        for transport, number in dict(self._counts.bytes_by_transport).items():
            size.add_metric([transport], number)
        seconds = CounterMetricFamily("baton_transfer_seconds", "Seconds spent fetching them", labels=["transport"])
        for transport, number in dict(self._counts.seconds_by_transport).items():
            seconds.add_metric([transport], number)
        yield from (size, seconds)
