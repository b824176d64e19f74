"""Adds to the routes what the frontend cannot do: fields that it drops, and answers with the prompt of a request."""

from collections.abc import Iterable

import msgspec

from baton.edge.extra_options import carry_extra_options
from baton.edge.prompt_requests import CHAT, COMPLETIONS
from baton.edge.routes import Json, Prepare, Route
from baton.edge.scoring import compose


def with_prompt_answers(routes: Iterable[Route]) -> tuple[Route, ...]:
    """Return the routes; those of chats and completions take extra options and return prompts."""
    return tuple(_extended(route) if route.path in (CHAT, COMPLETIONS) else route for route in routes)


def _extended(route: Route) -> Route:
    return msgspec.structs.replace(route, prepare=_carrying(route.prepare), compose=compose)


def _carrying(prepare: Prepare | None) -> Prepare:
    """Return `prepare` with what it leaves for the workers put into an annotation."""

    def carry(path: str, body: Json) -> Json:
        return carry_extra_options(body if prepare is None else prepare(path, body))

    return carry
