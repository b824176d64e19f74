"""Prometheus metrics of one worker, and its one log line for each request."""

import logging
from collections.abc import Mapping
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry, generate_latest

from baton.metrics.families import Counted, Distribution, Observed, Scraped
from baton.metrics.process import process_registry
from baton.metrics.worker_families import (
    BLOCKS,
    COMMAND_DURATION,
    COMMANDS,
    DURATION,
    ENDED_ROOMS,
    ERRORS,
    FIRST_OUTPUT,
    HEALTHY,
    IN_FLIGHT,
    MEDIA_BYTES,
    MEDIA_ITEMS,
    MEDIA_LOOKUPS,
    MODEL_LOAD,
    OPEN_ROOMS,
    PREFILL,
    QUEUE,
    REQUESTS,
    RUNNING,
    STEPS,
    TOKEN_GAP,
    TOKENS,
    TRANSFER_BYTES,
    TRANSFER_DURATION,
    WAITING,
)
from baton.ports.observer import RequestRecord
from baton.protocol.events import LoadSnapshot
from baton.protocol.lifecycle import TERMINAL

log = logging.getLogger("baton.request")

T = TypeVar("T")


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
    def seconds_by_transport(self) -> Mapping[str, Distribution]:
        """How long each fetch took."""


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
    """An Observer (see `ports/observer.py`) with the worker's gauges beside it. Used in the event loop."""

    def __init__(self, role: str, model: str = "", engine: str = "none") -> None:
        self.registry = registry = process_registry(role, model, engine)
        requests = Counted(REQUESTS, registry)
        self._by_state = {
            (name, state): requests.labels(name, state.value) for name in (role, "canary") for state in TERMINAL
        }
        self._errors = Counted(ERRORS, registry)
        tokens = Counted(TOKENS, registry)
        self._prompt, self._cached, self._completion = (
            tokens.labels(role, kind) for kind in ("prompt", "cached", "completion")
        )
        self._first = Observed(FIRST_OUTPUT, registry).labels(role)
        self._duration = Observed(DURATION, registry).labels(role)
        self.token_gaps, self._queue, self._prefill = (
            Observed(family, registry if role in family.processes else CollectorRegistry()).labels(role)
            for family in (TOKEN_GAP, QUEUE, PREFILL)
        )
        self.in_flight = Counted(IN_FLIGHT, registry)
        self.healthy = Counted(HEALTHY, registry)
        self.model_load_seconds = Counted(MODEL_LOAD, registry)
        self.steps = Counted(STEPS, registry)
        self._running = Counted(RUNNING, registry)
        self._waiting = Counted(WAITING, registry)
        self._blocks = Counted(BLOCKS, registry)
        self._commands = Counted(COMMANDS, registry)
        self._command_seconds = Observed(COMMAND_DURATION, registry)

    def finished(self, record: RequestRecord) -> None:
        """See `Observer.finished`."""
        self._by_state[record.role, record.state].inc()
        if record.error_code is not None:
            self._errors.labels(record.error_code).inc()
        if record.role != "canary":  # tokens and times count clients only
            self._count(record)
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
            extra={"request_id": record.request_id, "trace_id": record.trace_id},
        )

    def _count(self, record: RequestRecord) -> None:
        self._prompt.inc(record.prompt_tokens)
        self._cached.inc(record.cached_tokens)
        self._completion.inc(record.completion_tokens)
        if record.first_output_s is not None:
            self._first.observe(record.first_output_s)
        self._duration.observe(record.duration_s)
        if record.queue_s is not None:
            self._queue.observe(record.queue_s)
        if record.prefill_s is not None:
            self._prefill.observe(record.prefill_s)

    def load(self, snapshot: LoadSnapshot) -> None:
        """Show the load of one data-parallel rank of the engine."""
        rank = str(snapshot.dp_rank)
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
            Scraped(OPEN_ROOMS, self.registry, lambda: _by_label(rooms.open))
            Scraped(ENDED_ROOMS, self.registry, lambda: _by_label(rooms.ended))
        if traffic is not None:
            Scraped(TRANSFER_BYTES, self.registry, lambda: _by_label(traffic.bytes_by_transport))
            Observed(TRANSFER_DURATION, self.registry, lambda: _by_label(traffic.seconds_by_transport))

    def show_embeddings(self, store: EmbeddingCounts) -> None:
        """Export the embedding cache of this worker, where it has one."""
        Scraped(MEDIA_LOOKUPS, self.registry, lambda: [(("hit",), store.hits), (("miss",), store.misses)])
        Scraped(MEDIA_BYTES, self.registry, lambda: [((), store.used_bytes)])
        Scraped(
            MEDIA_ITEMS,
            self.registry,
            lambda: [(("pinned",), store.pinned), (("cached",), store.entries - store.pinned)],
        )

    def render(self) -> str:
        """Return everything as Prometheus text."""
        return generate_latest(self.registry).decode()


def _by_label(values: Mapping[str, T]) -> list[tuple[tuple[str, ...], T]]:
    """Return a copy of `values`, which may change at any time, as the values of one label."""
    return [((label,), value) for label, value in dict(values).items()]
