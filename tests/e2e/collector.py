"""An OTLP/HTTP collector: receives spans from any number of processes, and keeps them by trace."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from tests.e2e.harness import eventually

EXPORT_MS = 100


class ReceivedSpan(NamedTuple):
    """One span, with the service that sent it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_span_id: str
    attributes: dict[str, Any]
    events: list[str]
    is_error: bool
    message: str


class Collector:
    """What has been received so far."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._spans: list[ReceivedSpan] = []

    @property
    def settings(self) -> dict[str, str]:
        """The variables that make processes export to this collector, soon."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": str(EXPORT_MS)}

    def receive(self, body: bytes) -> None:
        """Take the body of one request."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            service = _values(resource.resource.attributes).get("service.name", "")
            for scope in resource.scope_spans:
                self._spans += [_received(service, span) for span in scope.spans]

    def spans(self, trace_id: str) -> list[ReceivedSpan]:
        """Return the spans of a trace."""
        return [span for span in tuple(self._spans) if span.trace_id == trace_id]

    def hops(self, trace_id: str, count: int) -> list[ReceivedSpan]:
        """Return the spans of the requests of a trace, one for each process, once there are `count`."""

        def found() -> list[ReceivedSpan]:
            hops = [span for span in self.spans(trace_id) if span.name.startswith("baton ")]
            return hops if len(hops) >= count else []

        return eventually(found, 30.0, f"{count} hops of trace {trace_id}")

    def orphans(self, trace_id: str, client_span_id: str) -> list[ReceivedSpan]:
        """Return the spans whose parent is neither there nor the client's."""
        spans = self.spans(trace_id)
        known = {span.span_id for span in spans} | {client_span_id}
        return [span for span in spans if span.parent_span_id not in known]


def _received(service: str, span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex(),
        attributes=_values(span.attributes),
        events=[event.name for event in span.events],
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
        message=span.status.message,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def running_collector() -> Iterator[Collector]:
    """Run a collector on a free port of the loopback interface within the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.receive(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
