"""The edge's own metrics: answers by route and status, and open connections, as Prometheus text."""

from collections import Counter

from baton.edge.routes import Route

_OTHER = "other"


class EdgeCounts:
    """Counts in the event loop; a dictionary entry per answer."""

    def __init__(self) -> None:
        self._answers: Counter[tuple[str, int]] = Counter()
        self.connections = 0

    def answered(self, route: Route | None, status: int) -> None:
        """Note an answer. Requests without a route count as one route: their paths are the clients'."""
        self._answers[_OTHER if route is None else route.path, status] += 1

    def exposition(self) -> bytes:
        """Return the metrics."""
        lines = [
            "# HELP baton_edge_answers_total Answers of the edge, by route and HTTP status.",
            "# TYPE baton_edge_answers_total counter",
            *(
                f'baton_edge_answers_total{{route="{path}",status="{status}"}} {count}'
                for (path, status), count in sorted(self._answers.items())
            ),
            "# HELP baton_edge_connections Open connections of clients.",
            "# TYPE baton_edge_connections gauge",
            f"baton_edge_connections {self.connections}",
        ]
        return "\n".join(lines).encode() + b"\n"
