"""The routes of the public endpoint: which bodies are checked, which answers completed, and what the edge answers."""

from collections.abc import Mapping

from msgspec.structs import replace

from baton.edge.answers import (
    normalise_chat,
    normalise_completion,
    normalise_completion_events,
    normalise_message_events,
)
from baton.edge.fields.prepare import TABLES, prepare
from baton.edge.forced_calls import as_stream, joined_answer
from baton.edge.routes import ROUTES, Join, Normalise, NormaliseEvents, Own, Route

_JOIN = {"/v1/chat/completions": Join(as_stream, joined_answer)}

_WHOLE: dict[str, Normalise] = {
    "/v1/chat/completions": normalise_chat,
    "/v1/completions": normalise_completion,
}
_EVENTS: dict[str, NormaliseEvents] = {
    "/v1/completions": normalise_completion_events,
    "/v1/messages": normalise_message_events,
}


def public_routes(own: Mapping[str, Own]) -> tuple[Route, ...]:
    """Return all routes; `own` answers those of its paths."""
    return tuple(
        replace(
            route,
            prepare=prepare if route.path in TABLES else None,
            join=_JOIN.get(route.path),
            normalise=_WHOLE.get(route.path),
            normalise_events=_EVENTS.get(route.path),
            own=own.get(route.path),
        )
        for route in ROUTES
    )
