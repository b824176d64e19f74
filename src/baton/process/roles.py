"""The roles of a worker: which one it has, the service and the probe that it runs, and its model card."""

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.config.peer_tls import peer_tls
from baton.config.settings import Settings
from baton.errors import ConfigError, InvalidRequest
from baton.handlers.aggregated import AggregatedHandler
from baton.handlers.decode import DecodeHandler
from baton.handlers.embed import EmbedHandler
from baton.handlers.encode import EncodeHandler
from baton.handlers.media import MediaInput
from baton.handlers.prefill import PrefillHandler
from baton.handlers.probe import ONE_TOKEN, ONE_VECTOR, ProbeContext, ProbeHandler, read_to_end
from baton.handlers.text import TextHandler
from baton.health.canary import Probe
from baton.models.families import NO_PARSER
from baton.models.tokenizer import HubTokenizer, HubTokenTexts, PassageTokenizer
from baton.ports.engine import (
    Capabilities,
    EmbedEngine,
    EncodeEngine,
    EngineInfo,
    GenerateEngine,
    HandoffStyle,
    KvImportEngine,
)
from baton.ports.runtime import ChatFormat, Locality, ModelCard, PushService, Service
from baton.ports.transfer import KvShape
from baton.process.role_context import RoleContext
from baton.process.worker_media import WorkerMedia, build_media, takes_files
from baton.protocol.codec import decode_request, encode_chunk
from baton.protocol.embeddings import decode_embed, encode_embeddings
from baton.protocol.text import decode_text, encode_text
from baton.protocol.wrapped import decode_prefill_request
from baton.runtimes.dynamo.addresses import bind_address

if TYPE_CHECKING:
    from baton.transfer.room_client import RoomClient
    from baton.transfer.room_server import RoomServer

log = logging.getLogger(__name__)

_SURFACES = {
    "aggregated": frozenset({"chat", "completions"}),
    "embed": frozenset({"embeddings"}),
    "prefill": frozenset({"prefill"}),
    "decode": frozenset({"chat", "completions"}),
    "encode": frozenset(),  # the frontend calls it before the workers that serve a surface
}
_NEEDS = {
    "prefill": (("decode",),),
    "decode": (("prefill",),),
    "encode": (("aggregated",), ("prefill", "decode")),
}

_COMPUTES = ("aggregated", "prefill", "decode")


def path_of(settings: Settings, role: str) -> str:
    """Return the endpoint path of workers of `role`."""
    return f"{settings.namespace}.{role if role in _NEEDS or role == 'process' else 'worker'}.generate"


def role_of(settings: Settings, capabilities: Capabilities) -> str:
    """Return the role of a worker with these capabilities. Raises ConfigError if the engine cannot serve it."""
    role = settings.role
    if role == "auto":
        role = "aggregated" if capabilities.generate else "embed"
    serves = {"embed": capabilities.embeddings, "encode": capabilities.media_encoding}
    if not serves.get(role, capabilities.generate):
        raise ConfigError(
            f"the model {settings.first_name} on the engine {settings.engine} cannot serve the role {role}"
        )
    if settings.media.encoders and role in _COMPUTES and not _takes_encoded(capabilities):
        raise ConfigError(
            f"the engine {settings.engine} does not read media from encode workers: drop --media-encoders"
        )
    if role in ("prefill", "decode"):
        _refuse_without_handoff(settings, capabilities, role)
    return role


def _refuse_without_handoff(settings: Settings, capabilities: Capabilities, role: str) -> None:
    if capabilities.diffusion:
        raise ConfigError(
            f"the model {settings.first_name} is a diffusion language model, which has no role {role}: it computes its"
            " output in blocks, on aggregated workers"
        )
    if capabilities.handoff is HandoffStyle.NONE:
        raise ConfigError(f"the engine {settings.engine} does not support KV handoff between workers: no role {role}")


def _takes_encoded(can: Capabilities) -> bool:
    return can.media_embeddings or can.media_handles


class RoleService:
    """A role that is running: its service, its probe (the smallest request that it handles), and what it owns."""

    def __init__(
        self,
        service: Service[Any, Any],
        probe: Probe,
        shape: KvShape | None = None,
        producer: "RoomServer | None" = None,
        consumer: "RoomClient | None" = None,
        media: "WorkerMedia | None" = None,
    ) -> None:
        self.service = service
        self.probe = probe
        self.shape = shape
        self.producer = producer
        self.consumer = consumer
        self.media = media

    async def drain(self, timeout_s: float) -> bool:
        """Wait until every lease has ended; return False if that takes longer than `timeout_s`."""
        return self.producer is None or await self.producer.drain(timeout_s)

    async def close(self) -> None:
        """Close what the role owns. Idempotent."""
        if self.producer is not None:
            await self.producer.close()
        if self.consumer is not None:
            await self.consumer.close()
        if self.media is not None:
            await self.media.close()


async def build_role(role: str, context: RoleContext) -> RoleService:
    """Build and start `role`. Raises ConfigError."""
    return await _ROLES[role](context)


def announce(role: str, context: RoleContext, role_service: RoleService) -> ModelCard:
    """Return the model card that makes frontends send this worker the requests of its role."""
    settings, info = context.settings, context.info
    model_input = "text" if role == "embed" else settings.model_input
    host, port = _bootstrap_address(context, role_service) if role == "prefill" else (None, None)
    return ModelCard(
        name=info.model_name,
        other_names=settings.served_names[1:],
        directory=info.model_dir,
        # The frontend cannot tokenise for embedding models: it requires an end-of-text token of every model.
        model_input=model_input,
        surfaces=_SURFACES[role],
        worker_type=role if role in _NEEDS else "aggregated",
        needs=_needs(role, context),
        context_length=info.context_length,
        block_size=info.block_size,
        total_blocks=info.total_blocks,
        max_running=info.max_running,
        max_batch_tokens=info.max_batch_tokens,
        handoff_host=host,
        handoff_port=port,
        # A router matches prefixes by tokens, and has none where the worker tokenises. It routes to decode workers by
        # load only, and an encode worker has no KV.
        kv_events=model_input == "tokens" and role not in ("decode", "encode"),
        dp_size=context.engine.capabilities.dp_size,
        chat=chat_format(settings),
        router=_router(role, settings),
        taints=frozenset(filter(None, map(str.strip, settings.taints.split(",")))),
        locality=_locality(settings),
    )


def _router(role: str, settings: Settings) -> str | None:
    setting = {"prefill": settings.router_prefill, "decode": settings.router_decode}.get(role, "auto")
    return None if setting == "auto" else setting


def _locality(settings: Settings) -> Locality | None:
    domain, _, value = settings.kv.locality.partition("=")
    return Locality(domain=domain, value=value, enforcement=settings.kv.locality_enforcement) if value else None


def chat_format(settings: Settings) -> ChatFormat:
    """Return how frontends render prompts and parse answers, by prepared settings."""
    return ChatFormat(
        template=settings.chat_template or None,
        tool_call_parser=_parser(settings.tool_call_parser),
        reasoning_parser=_parser(settings.reasoning_parser),
    )


def _parser(setting: str) -> str | None:
    return None if setting in ("auto", NO_PARSER) else setting


def _needs(role: str, context: RoleContext) -> tuple[tuple[str, ...], ...]:
    """Return the roles that must run for this worker to get requests: all those of one of the groups.

    A frontend calls encode workers for a worker that names them in a group.
    """
    if not context.settings.media.encoders or role not in ("aggregated", "prefill"):
        return _NEEDS.get(role, ())
    groups = _NEEDS.get(role, ((),))
    with_encoders = tuple((*group, "encode") for group in groups)
    return (*with_encoders, *groups) if takes_files(context) else with_encoders


def _bootstrap_address(context: RoleContext, role_service: RoleService) -> tuple[str, int] | tuple[None, None]:
    """Return where decode workers claim KV, if they need the address before the prefill has begun."""
    return role_service.producer.address if role_service.producer is not None and _is_early(context) else (None, None)


def _is_early(context: RoleContext) -> bool:
    """Whether decode starts with prefill, not after it. Raises ConfigError if the engine cannot do what is set."""
    setting, style = context.settings.kv.handoff, context.engine.capabilities.handoff
    if setting not in ("auto", style.value) and context.info.kv is None:
        raise ConfigError(
            f"the engine {context.settings.engine} supports only {style.value} handoff: drop --kv-handoff {setting}"
        )
    return style is HandoffStyle.EARLY if setting == "auto" else setting == "early"


async def _embed(context: RoleContext) -> RoleService:
    engine = context.engine
    if not isinstance(engine, EmbedEngine):
        raise _no_ability(context, "embed")
    encoder = PassageTokenizer(Path(context.info.model_dir))
    handler = EmbedHandler(engine, context.info, context.tracker, encoder)
    prober = EmbedHandler(engine, context.info, context.probe_tracker, encoder)
    return RoleService(
        Service(handler.embed, decode_embed, encode_embeddings),
        lambda: read_to_end(prober.embed(ONE_VECTOR, ProbeContext())),
    )


async def _encode(context: RoleContext) -> RoleService:
    engine = context.engine
    if not isinstance(engine, EncodeEngine):
        raise _no_ability(context, "encode")
    from baton.media.images import probe_image
    from baton.transfer.room_server import open_room_server

    media = build_media(context, "encode")
    assert media.loader is not None
    memory = media.store.memory if media.store is not None else None
    runtime = context.settings.runtime
    producer = await open_room_server(context.settings.kv, memory, bind_address(runtime), tls=peer_tls(runtime))
    timeout_s = context.settings.kv.claim_timeout_s
    handler = EncodeHandler(
        engine, context.info, context.tracker, media.loader, producer, media.encoder, claim_timeout_s=timeout_s
    )
    prober = EncodeHandler(engine, context.info, context.probe_tracker, media.loader, producer)
    prompt, image = _image_prompt(context), probe_image()
    return RoleService(
        Service(handler.generate, decode_request, encode_chunk),
        _no_probe if prompt is None else lambda: prober.probe(prompt, image, ProbeContext()),
        producer=producer,
        media=media,
    )


def _tokenizer(context: RoleContext) -> HubTokenizer:
    return HubTokenizer(Path(context.info.model_dir), context.settings.chat_template)


def _texts(context: RoleContext) -> HubTokenTexts:
    return HubTokenTexts(Path(context.info.model_dir))


async def _no_probe() -> None:
    """The probe of a worker that cannot be probed. The health checks of its engine are all there is."""


def _image_prompt(context: RoleContext) -> tuple[int, ...] | None:
    """Return a prompt with a place for one image; None if the model's chat template cannot render one."""
    image_first = [{"type": "image"}, {"type": "text", "text": "."}]
    try:
        tokenizer = _tokenizer(context)
        tokens = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": image_first}]))
    except (ConfigError, InvalidRequest) as error:
        log.warning("this worker is not probed: there is no prompt with an image: %s", error.message)
        return None
    if context.info.media is not None:
        placeholder = context.info.media.placeholders.get("image")
        if placeholder is None or tokens.count(placeholder.token) != 1:
            log.warning("this worker is not probed: the chat template of its model renders no placeholder for an image")
            return None
    return tuple(tokens)


def _generating(context: RoleContext) -> GenerateEngine:
    if not isinstance(context.engine, GenerateEngine):
        raise _no_ability(context, "generate")
    return context.engine


def _no_ability(context: RoleContext, ability: str) -> ConfigError:
    return ConfigError(f"the engine {context.settings.engine} does not {ability}")


async def _aggregated(context: RoleContext) -> RoleService:
    prober = AggregatedHandler(_generating(context), context.info, context.probe_tracker)
    media = build_media(context, "aggregated")
    return RoleService(
        _generate(context, media.input),
        lambda: read_to_end(prober.generate(ONE_TOKEN, ProbeContext())),
        consumer=media.consumer,
        media=media,
    )


def _generate(context: RoleContext, media_input: MediaInput) -> Service[Any, Any]:
    if context.settings.model_input == "text":
        text = TextHandler(
            _generating(context), context.info, context.tracker, _tokenizer(context), context.settings.served_names
        )
        return Service(text.generate, decode_text, encode_text)
    return PushService(
        AggregatedHandler(_generating(context), context.info, context.tracker, media_input, _texts(context)).generate,
        decode_request,
        encode_chunk,
    )


async def _prefill(context: RoleContext) -> RoleService:
    from baton.transfer.room_server import open_room_server  # imports numpy, which other roles do not need

    bootstrap = None
    if _is_early(context) and context.info.handoff_host is not None and context.info.handoff_port is not None:
        bootstrap = (context.info.handoff_host, context.info.handoff_port)
    producer = await open_room_server(
        context.settings.kv,
        context.info.kv,
        bind_address(context.settings.runtime),
        bootstrap,
        peer_tls(context.settings.runtime),
    )
    media = build_media(context, "prefill")
    handler = PrefillHandler(_generating(context), context.info, context.tracker, producer, media.input)
    return RoleService(
        Service(handler.generate, decode_prefill_request, encode_chunk),
        _local_probe(context),
        _shape(context.info),
        producer=producer,
        consumer=media.consumer,
        media=media,
    )


async def _decode(context: RoleContext) -> RoleService:
    from baton.transfer.room_client import open_room_client

    consumer = open_room_client(context.settings.kv, context.info.kv, peer_tls(context.settings.runtime))
    media = build_media(context, "decode")
    engine = _generating(context)
    if context.info.kv is not None and not isinstance(engine, KvImportEngine):
        raise _no_ability(context, "import KV")
    handler = DecodeHandler(engine, context.info, context.tracker, consumer, media.input, _texts(context))
    return RoleService(
        PushService(handler.generate, decode_request, encode_chunk),
        _local_probe(context),
        _shape(context.info),
        consumer=consumer,
        media=media,
    )


def _local_probe(context: RoleContext) -> Probe:
    prober = ProbeHandler(_generating(context), context.info, context.probe_tracker)
    return lambda: read_to_end(prober.generate(ONE_TOKEN, ProbeContext()))


def _shape(info: EngineInfo) -> KvShape | None:
    shape = info.kv.shape if info.kv is not None else None
    return shape if isinstance(shape, KvShape) else None


_ROLES: dict[str, Callable[[RoleContext], Awaitable[RoleService]]] = {
    "aggregated": _aggregated,
    "embed": _embed,
    "prefill": _prefill,
    "decode": _decode,
    "encode": _encode,
}
