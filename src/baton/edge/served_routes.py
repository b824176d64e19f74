"""The routes with what the edge does with the requests and answers of each."""

import msgspec

from baton.edge.extra_options import carry_extra_options
from baton.edge.prompt_requests import CHAT, COMPLETIONS
from baton.edge.routes import ROUTES, Json, Route
from baton.edge.scoring import compose


def served_routes() -> tuple[Route, ...]:
    """Return the routes of the edge."""
    return tuple(_connected(route) if route.path in (CHAT, COMPLETIONS) else route for route in ROUTES)


def _connected(route: Route) -> Route:
    return msgspec.structs.replace(route, prepare=_prepare, compose=compose)


def _prepare(path: str, body: Json) -> Json:
    return carry_extra_options(body)
