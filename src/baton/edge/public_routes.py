"""The routes of the public endpoint: which bodies are checked, which answers completed, and what the edge answers."""

from collections.abc import Mapping

from msgspec.structs import replace

from baton.edge.answers import (
    has_chat_content,
    normalise_chat,
    normalise_completion,
    normalise_completion_events,
    normalise_message_events,
)
from baton.edge.extra_options import carry_extra_options
from baton.edge.fields.prepare import TABLES, prepare
from baton.edge.forced_calls import as_stream, joined_answer
from baton.edge.prompt_requests import CHAT, COMPLETIONS
from baton.edge.routes import ROUTES, Compose, IsNormal, Join, Json, Normalise, NormaliseEvents, Own, Prepare, Route
from baton.edge.scoring import compose


def _prepare_with_options(path: str, body: Json) -> Json:
    return carry_extra_options(prepare(path, body))


_PREPARED: dict[str, Prepare] = {
    **dict.fromkeys(TABLES, prepare),
    **dict.fromkeys((CHAT, COMPLETIONS, "/v1/responses"), _prepare_with_options),
}
_COMPOSED: dict[str, Compose] = dict.fromkeys((CHAT, COMPLETIONS), compose)
_JOINED = {CHAT: Join(as_stream, joined_answer)}
_WHOLE: dict[str, Normalise] = {CHAT: normalise_chat, COMPLETIONS: normalise_completion}
_NORMAL: dict[str, IsNormal] = {CHAT: has_chat_content}
_EVENTS: dict[str, NormaliseEvents] = {
    COMPLETIONS: normalise_completion_events,
    "/v1/messages": normalise_message_events,
}


def public_routes(own: Mapping[str, Own]) -> tuple[Route, ...]:
    """Return all routes; `own` answers those of its paths."""
    return tuple(
        replace(
            route,
            prepare=_PREPARED.get(route.path),
            compose=_COMPOSED.get(route.path),
            join=_JOINED.get(route.path),
            normalise=_WHOLE.get(route.path),
            is_normal=_NORMAL.get(route.path),
            normalise_events=_EVENTS.get(route.path),
            own=own.get(route.path),
        )
        for route in ROUTES
    )
