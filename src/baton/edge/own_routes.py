"""What the edge answers itself, by path."""

import functools
from collections.abc import Mapping

import msgspec

from baton import __version__
from baton.edge.counts import EdgeCounts
from baton.edge.messages import Answer, Request
from baton.edge.openapi import Version, document
from baton.edge.routes import Frontend, Own
from baton.edge.served_models import Cards, ServedModels
from baton.edge.tokenize import TokenizeRoutes

_METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def own_routes(cards: Cards, counts: EdgeCounts) -> Mapping[str, Own]:
    """Return the handlers of the routes that the edge answers."""
    models = ServedModels(cards)
    tokens = TokenizeRoutes(models)

    async def metrics(request: Request, frontend: Frontend) -> Answer:
        _, body = await frontend.fetch("/metrics")
        return Answer(body=body + counts.exposition(), content_type=_METRICS_TYPE)

    return {
        "/v1/models": models.list_all,
        "/v1/models/": models.retrieve,
        "/v1/messages/count_tokens": tokens.count_tokens,
        "/tokenize": tokens.tokenize,
        "/detokenize": tokens.detokenize,
        "/version": _version,
        "/metrics": metrics,
        "/openapi.json": _openapi,
    }


async def _version(request: Request, frontend: Frontend) -> Answer:
    return Answer(body=msgspec.json.encode(Version(version=__version__)))


async def _openapi(request: Request, frontend: Frontend) -> Answer:
    return Answer(body=_document())


@functools.cache
def _document() -> bytes:
    return msgspec.json.encode(document())
