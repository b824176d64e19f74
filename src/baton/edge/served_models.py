"""The models that clients can use: `/v1/models`, and the card behind a name."""

import time
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import unquote

import msgspec

from baton.edge.errors import FieldError
from baton.edge.messages import Answer, Request
from baton.edge.routes import Frontend
from baton.errors import PeerLost
from baton.ports.runtime import ModelCard

_LIST = "/v1/models"
_OWNER = "baton"


class Cards(Protocol):
    """The cards of the models in discovery."""

    def cards(self) -> Sequence[ModelCard]:
        """Return the card of each registered process that serves a route for clients."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The routes of a model, and what its answers can contain."""

    chat: bool
    completions: bool
    embeddings: bool
    tools: bool
    reasoning: bool


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `/v1/models`. `created` is when this process saw the model first."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = _OWNER
    max_model_len: int | None = None
    capabilities: Capabilities | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/models`."""

    object: str = "list"
    data: list[Model]


class _Listed(msgspec.Struct):
    id: str
    context_window: int | None = None


class _Listing(msgspec.Struct):
    data: list[_Listed]


class ServedModels:
    """What the frontend lists, with what the cards of the models say about them."""

    def __init__(self, cards: Cards) -> None:
        self._cards = cards
        self._first_seen: dict[str, int] = {}

    async def list_all(self, request: Request, frontend: Frontend) -> Answer:
        """Answer `/v1/models`."""
        return Answer(body=msgspec.json.encode(ModelList(data=await self._models(frontend))))

    async def retrieve(self, request: Request, frontend: Frontend) -> Answer:
        """Answer `/v1/models/{id}`."""
        name = unquote(request.path.removeprefix(f"{_LIST}/"))
        models = await self._models(frontend)
        found = next((model for model in models if model.id == name), None)
        if found is None:
            raise _missing(name, [model.id for model in models])
        return Answer(body=msgspec.json.encode(found))

    def card(self, name: str | None) -> ModelCard:
        """Return the card of a model; without a name, of the only one. Raises FieldError."""
        cards = {card.name: card for card in self._cards.cards()}
        if name is None and len(cards) == 1:
            return next(iter(cards.values()))
        if name is None:
            raise FieldError("model", "Missing required parameter: 'model'.", code="missing_required_parameter")
        if name not in cards:
            raise _missing(name, sorted(cards))
        return cards[name]

    async def _models(self, frontend: Frontend) -> list[Model]:
        status, body = await frontend.fetch(_LIST)
        if status != 200:
            raise PeerLost(f"the frontend does not list its models: status {status}")
        cards = {card.name: card for card in self._cards.cards()}
        return [self._model(entry, cards.get(entry.id)) for entry in msgspec.json.decode(body, type=_Listing).data]

    def _model(self, entry: _Listed, card: ModelCard | None) -> Model:
        return Model(
            id=entry.id,
            created=self._first_seen.setdefault(entry.id, int(time.time())),
            max_model_len=entry.context_window,
            capabilities=None if card is None else _capabilities(card),
        )


def _capabilities(card: ModelCard) -> Capabilities:
    return Capabilities(
        chat="chat" in card.surfaces,
        completions="completions" in card.surfaces,
        embeddings="embeddings" in card.surfaces,
        tools=card.chat.tool_call_parser is not None,
        reasoning=card.chat.reasoning_parser is not None,
    )


def _missing(name: str, served: Sequence[str]) -> FieldError:
    names = ", ".join(repr(each) for each in served) or "no model at the moment"
    message = f"The model {name!r} does not exist: this deployment serves {names}"
    return FieldError("model", message, code="model_not_found", status=404)
