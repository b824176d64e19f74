"""The roles of a worker: which one it has, what serves it, what it holds open meanwhile, and how it is announced."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from baton.config.settings import Settings
from baton.errors import ConfigError, InvalidRequest
from baton.handlers.aggregated import AggregatedHandler
from baton.handlers.decode import DecodeHandler
from baton.handlers.embed import EmbedHandler
from baton.handlers.encode import EncodeHandler
from baton.handlers.media import MediaInput
from baton.handlers.prefill import PrefillHandler
from baton.handlers.probe import ProbeHandler
from baton.handlers.text import TextHandler
from baton.health.canary import Probe
from baton.models.tokenizer import HubTokenizer, PassageTokenizer
from baton.ports.engine import (
    Capabilities,
    EmbedEngine,
    EncodeEngine,
    Engine,
    EngineInfo,
    GenerateEngine,
    HandoffStyle,
    KvImportEngine,
)
from baton.ports.runtime import ModelCard, Service
from baton.ports.transfer import KvShape
from baton.protocol.codec import decode_request, encode_chunk
from baton.protocol.embeddings import EmbedRequest, TokenLists, decode_embed, encode_embeddings
from baton.protocol.requests import GenerateRequest, StopConditions
from baton.protocol.text import decode_text, encode_text
from baton.request.tracker import RequestTracker

if TYPE_CHECKING:
    from baton.media.loader import PolicyLoader
    from baton.transfer.room_client import RoomClient
    from baton.transfer.room_server import RoomServer

ONE_TOKEN = GenerateRequest(token_ids=(1,), stop=StopConditions(max_tokens=1, ignore_eos=True))
ONE_VECTOR = EmbedRequest(model="", source=TokenLists(((1,),)))

_SURFACES = {
    "aggregated": frozenset({"chat", "completions"}),
    "embed": frozenset({"embeddings"}),
    "prefill": frozenset({"prefill"}),
    "decode": frozenset({"chat", "completions"}),
    "encode": frozenset(),  # the frontend calls it on the way to those that serve one
}
_NEEDS = {
    "prefill": (("decode",),),
    "decode": (("prefill",),),
    "encode": (("aggregated",), ("prefill", "decode")),
}


def path_of(settings: Settings, role: str) -> str:
    """Return where workers of `role` take requests."""
    return f"{settings.namespace}.{role if role in _NEEDS else 'worker'}.generate"


def role_of(settings: Settings, capabilities: Capabilities) -> str:
    """Return the role of a worker with such an engine. Raises ConfigError if the engine cannot fill it."""
    role = settings.role
    if role == "auto":
        role = "aggregated" if capabilities.generate else "embed"
    fills = {"embed": capabilities.embeddings, "encode": capabilities.media_encoding}
    if not fills.get(role, capabilities.generate):
        raise ConfigError(f"the model {settings.name} on the engine {settings.engine} cannot fill the role {role}")
    if settings.media.encoders and not capabilities.media_handles:
        raise ConfigError(f"the engine {settings.engine} does not read what encode workers hold: drop --media-encoders")
    if role in ("prefill", "decode") and capabilities.handoff is HandoffStyle.NONE:
        raise ConfigError(f"the engine {settings.engine} cannot hand KV from one worker to another: no role {role}")
    return role


class RoleService:
    """A role that is filled: what serves it, a probe (the least that it does, done as for a client), what is open."""

    def __init__(
        self,
        service: Service[Any, Any],
        probe: Probe,
        shape: KvShape | None = None,
        producer: "RoomServer | None" = None,
        consumer: "RoomClient | None" = None,
        media_input: MediaInput | None = None,
    ) -> None:
        self.service = service
        self.probe = probe
        self.shape = shape
        self.producer = producer
        self.consumer = consumer
        self._media_input = media_input

    async def drain(self, timeout_s: float) -> bool:
        """Wait until nobody needs what is held for others; return False if that takes longer than `timeout_s`."""
        return self.producer is None or await self.producer.drain(timeout_s)

    async def close(self) -> None:
        """Hold nothing any more. Idempotent."""
        if self.producer is not None:
            await self.producer.close()
        if self.consumer is not None:
            await self.consumer.close()
        if self._media_input is not None:
            await self._media_input.close()


class RoleContext(NamedTuple):
    """Where a role is filled: a running engine, a desk for clients and one for probes, which are never refused."""

    settings: Settings
    engine: Engine
    info: EngineInfo
    tracker: RequestTracker
    probe_tracker: RequestTracker


async def build_role(role: str, context: RoleContext) -> RoleService:
    """Fill `role` at `post`. Raises ConfigError."""
    return await _ROLES[role](context)


def announce(role: str, context: RoleContext, role_service: RoleService) -> ModelCard:
    """Return the card that makes frontends send this worker what its role is for."""
    settings, info = context.settings, context.info
    model_input = "text" if role == "embed" else settings.model_input
    host, port = _meeting_place(context, role_service)
    return ModelCard(
        name=info.model_name,
        directory=info.model_dir,
        # The frontend cannot tokenise for encoders: it asks every model for an end-of-text token.
        model_input=model_input,
        surfaces=_SURFACES[role],
        worker_type=role if role in _NEEDS else "aggregated",
        needs=_needs(role, settings),
        context_length=info.context_length,
        block_size=info.block_size,
        total_blocks=info.total_blocks,
        max_running=info.max_running,
        handoff_host=host,
        handoff_port=port,
        # A router compares tokens; where the worker makes them, it has none. Of decode workers it asks only the load,
        # and an encode worker has no KV.
        kv_events=model_input == "tokens" and role not in ("decode", "encode"),
        dp_size=context.engine.capabilities.dp_size,
    )


def _needs(role: str, settings: Settings) -> tuple[tuple[str, ...], ...]:
    """Return which roles must be there for this worker to be served: all those of one of the groups."""
    if not settings.media.encoders or role not in ("aggregated", "prefill"):
        return _NEEDS.get(role, ())
    return tuple((*group, "encode") for group in _NEEDS.get(role, ((),)))


def _meeting_place(context: RoleContext, role_service: RoleService) -> tuple[str, int] | tuple[None, None]:
    """Return where decode workers come for KV, if they are to know before the prefill has begun."""
    return role_service.producer.address if role_service.producer is not None and _is_early(context) else (None, None)


def _is_early(context: RoleContext) -> bool:
    """Whether decode is called with prefill and not after it. Raises ConfigError if the engine cannot do as asked."""
    asked, style = context.settings.kv.handoff, context.engine.capabilities.handoff
    if asked not in ("auto", style.value) and context.info.kv is None:
        raise ConfigError(
            f"the engine {context.settings.engine} hands KV over {style.value}: drop --kv-handoff {asked}"
        )
    return style is HandoffStyle.EARLY if asked == "auto" else asked == "early"


async def _embed(context: RoleContext) -> RoleService:
    engine = context.engine
    if not isinstance(engine, EmbedEngine):
        raise _missing(context, "embed")
    encoder = PassageTokenizer(Path(context.info.model_dir))
    handler = EmbedHandler(engine, context.info, context.tracker, encoder)
    prober = EmbedHandler(engine, context.info, context.probe_tracker, encoder)
    return RoleService(
        Service(handler.embed, decode_embed, encode_embeddings),
        lambda: _exhaust(prober.embed(ONE_VECTOR, _ProbeContext())),
    )


async def _encode(context: RoleContext) -> RoleService:
    engine = context.engine
    if not isinstance(engine, EncodeEngine):
        raise _missing(context, "encode")
    from baton.media.images import probe_image
    from baton.transfer.room_server import open_room_server

    loader = _loader(context)
    producer = await open_room_server(context.settings.kv, None, context.settings.runtime.bind)
    handler = EncodeHandler(engine, context.tracker, loader, producer)
    prober = EncodeHandler(engine, context.probe_tracker, loader, producer)
    prompt, picture = _picture_prompt(Path(context.info.model_dir)), probe_image()
    return RoleService(
        Service(handler.generate, decode_request, encode_chunk),
        lambda: prober.trial(prompt, picture, _ProbeContext()),
        producer=producer,
        media_input=MediaInput(loader),
    )


def _picture_prompt(directory: Path) -> tuple[int, ...]:
    """Return a prompt with a place for one image, as far as the model's chat template has one."""
    picture_first = [{"type": "image"}, {"type": "text", "text": "."}]
    try:
        tokenizer = HubTokenizer(directory)
        tokens = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": picture_first}]))
    except (ConfigError, InvalidRequest):
        tokens = []
    return tuple(tokens) or ONE_TOKEN.token_ids


def _generating(context: RoleContext) -> GenerateEngine:
    if not isinstance(context.engine, GenerateEngine):
        raise _missing(context, "generate")
    return context.engine


def _missing(context: RoleContext, ability: str) -> ConfigError:
    return ConfigError(f"the engine {context.settings.engine} does not {ability}")


async def _aggregated(context: RoleContext) -> RoleService:
    prober = AggregatedHandler(_generating(context), context.info, context.probe_tracker)
    consumer = _media_consumer(context)
    media_input = MediaInput(_media_loader(context), consumer)
    return RoleService(
        _generate(context, media_input),
        lambda: _exhaust(prober.generate(ONE_TOKEN, _ProbeContext())),
        consumer=consumer,
        media_input=media_input,
    )


def _media_loader(context: RoleContext) -> "PolicyLoader | None":
    return _loader(context) if context.engine.capabilities.modalities - {"text"} else None


def _loader(context: RoleContext) -> "PolicyLoader":
    from baton.media.loader import PolicyLoader  # takes Pillow along, which text does without

    return PolicyLoader(context.settings.media)


def _media_consumer(context: RoleContext) -> "RoomClient | None":
    if not context.engine.capabilities.media_handles:
        return None
    from baton.transfer.room_client import open_room_client

    return open_room_client(context.settings.kv, None)


def _generate(context: RoleContext, media_input: MediaInput) -> Service[Any, Any]:
    if context.settings.model_input == "text":
        text = TextHandler(
            _generating(context), context.info, context.tracker, HubTokenizer(Path(context.info.model_dir))
        )
        return Service(text.generate, decode_text, encode_text)
    return Service(
        AggregatedHandler(_generating(context), context.info, context.tracker, media_input).generate,
        decode_request,
        encode_chunk,
    )


async def _prefill(context: RoleContext) -> RoleService:
    from baton.transfer.room_server import open_room_server  # needs numpy, which other roles do without

    meeting = None
    if _is_early(context) and context.info.handoff_host is not None and context.info.handoff_port is not None:
        meeting = (context.info.handoff_host, context.info.handoff_port)
    producer = await open_room_server(context.settings.kv, context.info.kv, context.settings.runtime.bind, meeting)
    consumer = _media_consumer(context)
    media_input = MediaInput(_media_loader(context), consumer)
    handler = PrefillHandler(_generating(context), context.info, context.tracker, producer, media_input)
    return RoleService(
        Service(handler.generate, decode_request, encode_chunk),
        _local_probe(context),
        _shape(context.info),
        producer=producer,
        consumer=consumer,
        media_input=media_input,
    )


async def _decode(context: RoleContext) -> RoleService:
    from baton.transfer.room_client import open_room_client

    consumer = open_room_client(context.settings.kv, context.info.kv)
    media_input = MediaInput(_media_loader(context), consumer if context.info.kv is None else None)
    engine = _generating(context)
    if context.info.kv is not None and not isinstance(engine, KvImportEngine):
        raise _missing(context, "import KV")
    handler = DecodeHandler(engine, context.info, context.tracker, consumer, media_input)
    return RoleService(
        Service(handler.generate, decode_request, encode_chunk),
        _local_probe(context),
        _shape(context.info),
        consumer=consumer,
        media_input=media_input,
    )


def _local_probe(context: RoleContext) -> Probe:
    prober = ProbeHandler(_generating(context), context.info, context.probe_tracker)
    return lambda: _exhaust(prober.generate(ONE_TOKEN, _ProbeContext()))


def _shape(info: EngineInfo) -> KvShape | None:
    return info.kv.shape if info.kv is not None else None


_ROLES: dict[str, Callable[[RoleContext], Awaitable[RoleService]]] = {
    "aggregated": _aggregated,
    "embed": _embed,
    "prefill": _prefill,
    "decode": _decode,
    "encode": _encode,
}


async def _exhaust(replies: AsyncGenerator[Any, None]) -> None:
    async with aclosing(replies):
        async for _ in replies:
            pass


class _ProbeContext:
    """The canary is its own client, and does not leave."""

    id = "canary"
    trace_headers: dict[str, str] = {}

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Nothing to call: nobody leaves."""
