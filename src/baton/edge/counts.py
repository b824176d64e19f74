"""The edge's own metrics: answers by route and status, their duration, clients that left, and open connections."""

from http import HTTPStatus

from prometheus_client import CollectorRegistry, generate_latest

from baton.edge.routes import ROUTES, Route
from baton.metrics.families import OTHER, SECONDS, Counted, Family, Label, Observed, Value

_ROUTE = Label("route", tuple(sorted(route.path for route in ROUTES)))

ANSWERS = Family(
    name="baton_edge_answers_total",
    kind="counter",
    unit="answers",
    meaning="Answers to clients by route and HTTP status. Requests for other paths have the route `other`",
    processes=("frontend",),
    labels=(_ROUTE, Label("status", (*(str(status.value) for status in HTTPStatus), "529"))),
)
SECONDS_OF_ANSWERS = Family(
    name="baton_edge_answer_seconds",
    kind="histogram",
    unit="seconds",
    meaning="Time from the complete request to the last byte of its answer",
    processes=("frontend",),
    labels=(_ROUTE,),
    buckets=SECONDS,
)
ABANDONED = Family(
    name="baton_edge_abandoned_total",
    kind="counter",
    unit="requests",
    meaning="Requests whose connection closed before the answer was complete, mostly because the client left",
    processes=("frontend",),
    labels=(_ROUTE,),
)
IN_FLIGHT = Family(
    name="baton_edge_requests_in_flight",
    kind="gauge",
    unit="requests",
    meaning="Complete requests whose answers are not",
    processes=("frontend",),
)
CONNECTIONS = Family(
    name="baton_edge_connections",
    kind="gauge",
    unit="connections",
    meaning="Open connections of clients",
    processes=("frontend",),
)
FAMILIES = (ANSWERS, SECONDS_OF_ANSWERS, ABANDONED, IN_FLIGHT, CONNECTIONS)


class EdgeCounts:
    """Counts in the event loop; `registry` may have other metrics of the process."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = registry or CollectorRegistry()
        self._answers = Counted(ANSWERS, self._registry)
        self._by_status: dict[tuple[str, int], Value] = {}
        self._seconds = Observed(SECONDS_OF_ANSWERS, self._registry)
        self._abandoned = Counted(ABANDONED, self._registry)
        self.connections = 0
        self.in_flight = 0
        Counted(CONNECTIONS, self._registry).read(lambda: self.connections)
        Counted(IN_FLIGHT, self._registry).read(lambda: self.in_flight)

    def answered(self, route: Route | None, status: int) -> None:
        """Note the head of an answer. Requests without a route count as one route: their paths are the clients'."""
        key = (OTHER if route is None else route.path, status)
        value = self._by_status.get(key)
        if value is None:
            value = self._by_status[key] = self._answers.labels(key[0], str(status))
        value.inc()

    def completed(self, route: Route, seconds: float) -> None:
        """Note the end of an answer."""
        self.in_flight -= 1
        self._seconds.labels(route.path).observe(seconds)

    def abandoned(self, route: Route) -> None:
        """Note that a client has left before the end of its answer."""
        self.in_flight -= 1
        self._abandoned.labels(route.path).inc()

    def exposition(self) -> str:
        """Return the metrics as Prometheus text."""
        return generate_latest(self._registry).decode()
