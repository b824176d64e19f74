"""OpenTelemetry: exports the spans of finished timelines by OTLP, when the standard environment variables ask for it.

The event loop only puts a finished timeline into a queue; a thread makes spans and batches of it. OpenTelemetry is an
optional dependency, and is not imported unless it is used.
"""

import importlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from baton.timelines.spans import Span, spans_of
from baton.timelines.timeline import Timeline
from baton.timelines.trace_context import SAMPLED

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

MAX_QUEUED = 4096
CLOSE_TIMEOUT_S = 5.0
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}


def exports_traces(variables: Mapping[str, str]) -> bool:
    """Whether the standard variables ask for traces by OTLP."""
    if variables.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = [each.strip() for each in variables.get("OTEL_TRACES_EXPORTER", "").split(",") if each.strip()]
    if exporters:
        return "otlp" in exporters
    return any(variables.get(name) for name in _ENDPOINTS)


class TraceExport:
    """Exports the timelines that it is called with, from `start_export` to `close`."""

    def __init__(self, provider: "TracerProvider", ids: "_GivenIds", is_sampled: Callable[[str], bool]) -> None:
        self._provider = provider
        self._ids = ids
        self._tracer = provider.get_tracer("baton")
        self._queue: queue.Queue[Timeline | None] = queue.Queue(MAX_QUEUED)
        self._dropped = 0
        self.is_sampled = is_sampled
        """Whether a new trace with this id is exported, by OTEL_TRACES_SAMPLER."""
        self._thread = threading.Thread(target=self._run, name="otel-spans", daemon=True)
        self._thread.start()

    def __call__(self, timeline: Timeline) -> None:
        """Export a finished timeline. Never blocks; drops it if exporting is too slow."""
        if not timeline.trace.is_sampled:
            return
        try:
            self._queue.put_nowait(timeline)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                log.warning("traces are exported too slowly: some are dropped")

    def close(self) -> None:
        """Export what is left, within `CLOSE_TIMEOUT_S`. Called once, not from the event loop."""
        closing = threading.Thread(target=self._flush, name="otel-close", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)

    def _flush(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._provider.shutdown()

    def _run(self) -> None:
        while (timeline := self._queue.get()) is not None:
            try:
                for span in spans_of(timeline):
                    self._export(span)
            except Exception:
                log.exception("a timeline could not be exported")

    def _export(self, span: Span) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        self._ids.trace_id, self._ids.span_id = int(span.trace_id, 16), int(span.span_id, 16)
        made = self._tracer.start_span(
            span.name,
            context=_parent(span),
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            attributes=span.attributes,
            start_time=span.start_unix_ns,
        )
        for event in span.events:
            made.add_event(event.name, event.attributes, event.at_unix_ns)
        if span.error is not None:
            made.set_status(Status(StatusCode.ERROR, span.error))
        made.end(span.end_unix_ns)


class _GivenIds:
    """The SDK's source of ids: returns those of the span that is made next."""

    trace_id = 0
    span_id = 0

    def generate_trace_id(self) -> int:
        """See OpenTelemetry."""
        return self.trace_id

    def generate_span_id(self) -> int:
        """See OpenTelemetry."""
        return self.span_id

    def is_trace_id_random(self) -> bool:
        """See OpenTelemetry."""
        return True


def _parent(span: Span) -> "Context":
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if span.parent_span_id is None:
        return Context()
    parent = SpanContext(int(span.trace_id, 16), int(span.parent_span_id, 16), True, TraceFlags(SAMPLED))
    return set_span_in_context(NonRecordingSpan(parent), Context())


def start_export(role: str, process: str, variables: Mapping[str, str]) -> TraceExport | None:
    """Return the export of a process with this role and name; None, with a warning, if its packages are missing."""
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        exporter = _otlp_exporter(variables)
    except ImportError as error:
        log.warning(
            "traces are not exported, because a package is missing (%s): pip install 'baton-serve[otel]', or set"
            " OTEL_SDK_DISABLED=true",
            error,
        )
        return None
    attributes = {"service.instance.id": process}
    named = "OTEL_SERVICE_NAME" in variables or "service.name=" in variables.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not named:
        attributes["service.name"] = f"baton-{role}"
    # The provider's own sampler is the one of the environment; it decides about new traces when they begin.
    sampler = TracerProvider().sampler
    ids = _GivenIds()
    provider = TracerProvider(
        sampler=ALWAYS_ON,
        resource=Resource.create(attributes),
        id_generator=cast(Any, ids),  # has its methods; to inherit from it, the module would have to import it
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))

    def is_sampled(trace_id: str) -> bool:
        return bool(sampler.should_sample(None, int(trace_id, 16), "request").decision.is_sampled())  # type: ignore[no-untyped-call]

    return TraceExport(provider, ids, is_sampled)


def _otlp_exporter(variables: Mapping[str, str]) -> "SpanExporter":
    """Return the exporter of the protocol that the variables name. Raises ImportError."""
    protocol = next((variables[name] for name in _PROTOCOLS if variables.get(name)), "http/protobuf")
    if protocol not in _EXPORTERS:
        raise ImportError(f"there is no exporter for OTEL_EXPORTER_OTLP_PROTOCOL={protocol}; use http/protobuf or grpc")
    exporter: SpanExporter = importlib.import_module(_EXPORTERS[protocol]).OTLPSpanExporter()
    return exporter
