"""The cards of the models in discovery, as frontends see them, for every discovery backend."""

from collections.abc import Iterable

import msgspec
from dynamo import _core

from baton.ports.runtime import ChatFormat, ModelCard
from baton.runtimes.dynamo.tool_calls import parser_of_card

_SURFACES = {"Chat": "chat", "Completions": "completions", "Embedding": "embeddings"}


class _File(msgspec.Struct, frozen=True):
    path: str


class _TemplateFile(msgspec.Struct, frozen=True):
    file: _File
    is_custom: bool = False


class _RuntimeConfig(msgspec.Struct, frozen=True):
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    structural_tag_scope: str | None = None


class _Card(msgspec.Struct, frozen=True):
    """What Baton reads of the runtime's card."""

    display_name: str
    source_path: str = ""
    context_length: int = 0
    kv_cache_block_size: int = 0
    model_type: str = ""
    model_input: str = "Tokens"
    worker_type: str | None = None
    runtime_config: _RuntimeConfig = _RuntimeConfig()
    chat_template_file: dict[str, _TemplateFile] | None = None


class DynamoModelCards:
    """Follows the cards that processes of some components register."""

    def __init__(self, raw: _core.DistributedRuntime, endpoints: Iterable[str]) -> None:
        """Start to follow the components of `endpoints` ("namespace.component.endpoint")."""
        self._subscribers = [_core.FpmEventSubscriber(raw.endpoint(path)) for path in endpoints]
        for subscriber in self._subscribers:
            subscriber.start_tracking()

    def cards(self) -> list[ModelCard]:
        """Return the card of each process that is registered now and serves a route for clients."""
        found = [card for each in self._subscribers for card in map(read_card, each.get_model_cards().values())]
        return [card for card in found if card.surfaces]

    def close(self) -> None:
        """Stop following."""
        for subscriber in self._subscribers:
            subscriber.shutdown()


def read_card(text: str) -> ModelCard:
    """Return the card that the runtime has as JSON."""
    card = msgspec.json.decode(text, type=_Card)
    custom = [each.file.path for each in (card.chat_template_file or {}).values() if each.is_custom]
    config = card.runtime_config
    return ModelCard(
        name=card.display_name,
        directory=card.source_path,
        model_input=card.model_input.lower(),
        surfaces=frozenset(_SURFACES[kind] for kind in card.model_type.split(" | ") if kind in _SURFACES),
        worker_type=card.worker_type or "aggregated",
        context_length=card.context_length,
        block_size=card.kv_cache_block_size,
        total_blocks=0,
        max_running=0,
        chat=ChatFormat(
            template=custom[0] if custom else None,
            tool_call_parser=parser_of_card(config.tool_call_parser, config.structural_tag_scope),
            reasoning_parser=config.reasoning_parser,
        ),
    )
