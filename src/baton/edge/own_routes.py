"""What the edge answers itself, by path."""

import asyncio
import functools
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from baton import __version__
from baton.edge.messages import Answer, Request
from baton.edge.openapi import Version, document
from baton.edge.routes import Frontend, Own
from baton.edge.served_models import Cards, ServedModels
from baton.edge.tokenize import TokenizeRoutes
from baton.timelines.pages import page_of
from baton.timelines.reports import AboutReply, TimelinesReply

_METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Target(msgspec.Struct, frozen=True):
    """Addresses with metrics and their labels, as Prometheus takes them from an HTTP service discovery."""

    targets: tuple[str, ...]
    labels: dict[str, str]


class Reports(Protocol):
    """What this process reports about itself."""

    def about(self) -> AboutReply:
        """Return what the process is and does."""

    def timelines(self, after: int, limit: int) -> TimelinesReply:
        """Return the timelines of requests that run, and of those that finished after number `after`."""


def own_routes(
    cards: Cards, exposition: Callable[[str], str], targets: Callable[[], Sequence[Target]], reports: Reports
) -> Mapping[str, Own]:
    """Return the handlers of the routes that the edge answers.

    `exposition` returns the metrics of this process, given those of the frontend, and `targets` where Prometheus finds
    the metrics of the processes of this deployment.
    """
    models = ServedModels(cards)
    tokens = TokenizeRoutes(models)

    async def metrics(request: Request, frontend: Frontend) -> Answer:
        _, body = await frontend.fetch("/metrics")
        text = exposition(body.decode(errors="replace"))
        return Answer(body=text.encode(), content_type=_METRICS_TYPE)

    async def metrics_targets(request: Request, frontend: Frontend) -> Answer:
        found = await asyncio.to_thread(targets)
        return Answer(body=msgspec.json.encode(found))

    async def about(request: Request, frontend: Frontend) -> Answer:
        return Answer(body=msgspec.json.encode(reports.about()))

    async def timelines(request: Request, frontend: Frontend) -> Answer:
        page = page_of(dict(urllib.parse.parse_qsl(request.query.decode("latin-1"))))
        return Answer(body=msgspec.json.encode(reports.timelines(page.after, page.limit)))

    return {
        "/v1/models": models.list_all,
        "/v1/models/": models.retrieve,
        "/v1/messages/count_tokens": tokens.count_tokens,
        "/tokenize": tokens.tokenize,
        "/detokenize": tokens.detokenize,
        "/version": _version,
        "/metrics": metrics,
        "/metrics/targets": metrics_targets,
        "/openapi.json": _openapi,
        "/control/about": about,
        "/control/timelines": timelines,
    }


async def _version(request: Request, frontend: Frontend) -> Answer:
    return Answer(body=msgspec.json.encode(Version(version=__version__)))


async def _openapi(request: Request, frontend: Frontend) -> Answer:
    return Answer(body=_document())


@functools.cache
def _document() -> bytes:
    return msgspec.json.encode(document())
