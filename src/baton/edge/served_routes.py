"""The routes with what the edge does with the requests and answers of each."""

import msgspec

from baton.edge.extra_options import carry_extra_options
from baton.edge.fields.prepare import prepare
from baton.edge.prompt_requests import CHAT, COMPLETIONS
from baton.edge.routes import ROUTES, Json, Route
from baton.edge.scoring import compose


def served_routes() -> tuple[Route, ...]:
    """Return the routes of the edge."""
    return tuple(_connected(route) if route.path in (CHAT, COMPLETIONS) else route for route in ROUTES)


def _connected(route: Route) -> Route:
    return msgspec.structs.replace(route, prepare=prepared, compose=compose)


def prepared(path: str, body: Json) -> Json:
    """Return the body for the frontend, once its fields have been checked. See `Prepare`."""
    return carry_extra_options(prepare(path, body))
