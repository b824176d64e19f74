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
from baton.handlers.media import Intake
from baton.handlers.prefill import PrefillHandler
from baton.handlers.probe import TrialHandler
from baton.handlers.text import TextHandler
from baton.health.canary import Probe
from baton.models.tokenizer import HubTokenizer, PassageTokenizer
from baton.ports.engine import Capabilities, Engine, EngineInfo, HandoffStyle
from baton.ports.runtime import ModelCard, Service
from baton.ports.transfer import KvShape
from baton.protocol.codec import decode_request, encode_chunk
from baton.protocol.embeddings import EmbedRequest, TokenLists, decode_embed, encode_embeddings
from baton.protocol.requests import GenerateRequest, StopConditions
from baton.protocol.text import decode_text, encode_text
from baton.request.tracker import Desk

if TYPE_CHECKING:
    from baton.media.loader import PolicyLoader
    from baton.transfer.borrower import KvBorrower
    from baton.transfer.lender import KvLender

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


class Duty:
    """A role that is filled: what serves it, a probe (the least that it does, done as for a client), what is open."""

    def __init__(
        self,
        service: Service[Any, Any],
        probe: Probe,
        shape: KvShape | None = None,
        lender: "KvLender | None" = None,
        borrower: "KvBorrower | None" = None,
        intake: Intake | None = None,
    ) -> None:
        self.service = service
        self.probe = probe
        self.shape = shape
        self.lender = lender
        self.borrower = borrower
        self._intake = intake

    async def drain(self, timeout_s: float) -> bool:
        """Wait until nobody needs what is held for others; return False if that takes longer than `timeout_s`."""
        return self.lender is None or await self.lender.drain(timeout_s)

    async def close(self) -> None:
        """Hold nothing any more. Idempotent."""
        if self.lender is not None:
            await self.lender.close()
        if self.borrower is not None:
            await self.borrower.close()
        if self._intake is not None:
            await self._intake.close()


class Post(NamedTuple):
    """Where a role is filled: a running engine, a desk for clients and one for probes, which are never refused."""

    settings: Settings
    engine: Engine
    info: EngineInfo
    desk: Desk
    side_desk: Desk


async def take_up(role: str, post: Post) -> Duty:
    """Fill `role` at `post`. Raises ConfigError."""
    return await _ROLES[role](post)


def announce(role: str, post: Post, duty: Duty) -> ModelCard:
    """Return the card that makes frontends send this worker what its role is for."""
    settings, info = post.settings, post.info
    accepts = "text" if role == "embed" else settings.accepts
    host, port = _meeting_place(post, duty)
    return ModelCard(
        name=info.model_name,
        directory=info.model_dir,
        # The frontend cannot tokenise for encoders: it asks every model for an end-of-text token.
        accepts=accepts,
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
        kv_events=accepts == "tokens" and role not in ("decode", "encode"),
        dp_size=post.engine.capabilities.dp_size,
    )


def _needs(role: str, settings: Settings) -> tuple[tuple[str, ...], ...]:
    """Return which roles must be there for this worker to be served: all those of one of the groups."""
    if not settings.media.encoders or role not in ("aggregated", "prefill"):
        return _NEEDS.get(role, ())
    return tuple((*group, "encode") for group in _NEEDS.get(role, ((),)))


def _meeting_place(post: Post, duty: Duty) -> tuple[str, int] | tuple[None, None]:
    """Return where decode workers come for KV, if they are to know before the prefill has begun."""
    return duty.lender.address if duty.lender is not None and _is_early(post) else (None, None)


def _is_early(post: Post) -> bool:
    """Whether decode is called with prefill and not after it. Raises ConfigError if the engine cannot do as asked."""
    asked, style = post.settings.transfer.handoff, post.engine.capabilities.handoff
    if asked not in ("auto", style.value) and post.info.kv is None:
        raise ConfigError(
            f"the engine {post.settings.engine} hands KV over {style.value}: drop --transfer-handoff {asked}"
        )
    return style is HandoffStyle.EARLY if asked == "auto" else asked == "early"


async def _embed(post: Post) -> Duty:
    encoder = PassageTokenizer(Path(post.info.model_dir))
    handler = EmbedHandler(post.engine, post.info, post.desk, encoder)
    prober = EmbedHandler(post.engine, post.info, post.side_desk, encoder)
    return Duty(
        Service(handler.embed, decode_embed, encode_embeddings),
        lambda: _exhaust(prober.embed(ONE_VECTOR, _ProbeContext())),
    )


async def _encode(post: Post) -> Duty:
    from baton.media.images import trial_picture
    from baton.transfer.lender import open_lender

    loader = _loader(post)
    lender = await open_lender(post.settings.transfer, None, post.settings.runtime.bind)
    handler = EncodeHandler(post.engine, post.desk, loader, lender)
    prober = EncodeHandler(post.engine, post.side_desk, loader, lender)
    prompt, picture = _picture_prompt(Path(post.info.model_dir)), trial_picture()
    return Duty(
        Service(handler.generate, decode_request, encode_chunk),
        lambda: prober.trial(prompt, picture, _ProbeContext()),
        lender=lender,
        intake=Intake(loader),
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


async def _aggregated(post: Post) -> Duty:
    prober = AggregatedHandler(post.engine, post.info, post.side_desk)
    borrower = _media_borrower(post)
    intake = Intake(_media_loader(post), borrower)
    return Duty(
        _generate(post, intake),
        lambda: _exhaust(prober.generate(ONE_TOKEN, _ProbeContext())),
        borrower=borrower,
        intake=intake,
    )


def _media_loader(post: Post) -> "PolicyLoader | None":
    return _loader(post) if post.engine.capabilities.modalities - {"text"} else None


def _loader(post: Post) -> "PolicyLoader":
    from baton.media.loader import PolicyLoader  # takes Pillow along, which text does without

    return PolicyLoader(post.settings.media)


def _media_borrower(post: Post) -> "KvBorrower | None":
    if not post.engine.capabilities.media_handles:
        return None
    from baton.transfer.borrower import open_borrower

    return open_borrower(post.settings.transfer, None)


def _generate(post: Post, intake: Intake) -> Service[Any, Any]:
    if post.settings.accepts == "text":
        text = TextHandler(post.engine, post.info, post.desk, HubTokenizer(Path(post.info.model_dir)))
        return Service(text.generate, decode_text, encode_text)
    return Service(AggregatedHandler(post.engine, post.info, post.desk, intake).generate, decode_request, encode_chunk)


async def _prefill(post: Post) -> Duty:
    from baton.transfer.lender import open_lender  # needs numpy, which other roles do without

    meeting = None
    if _is_early(post) and post.info.handoff_host is not None and post.info.handoff_port is not None:
        meeting = (post.info.handoff_host, post.info.handoff_port)
    lender = await open_lender(post.settings.transfer, post.info.kv, post.settings.runtime.bind, meeting)
    borrower = _media_borrower(post)
    intake = Intake(_media_loader(post), borrower)
    handler = PrefillHandler(post.engine, post.info, post.desk, lender, intake)
    return Duty(
        Service(handler.generate, decode_request, encode_chunk),
        _trial(post),
        _shape(post.info),
        lender=lender,
        borrower=borrower,
        intake=intake,
    )


async def _decode(post: Post) -> Duty:
    from baton.transfer.borrower import open_borrower

    borrower = open_borrower(post.settings.transfer, post.info.kv)
    intake = Intake(_media_loader(post), borrower if post.info.kv is None else None)
    handler = DecodeHandler(post.engine, post.info, post.desk, borrower, intake)
    return Duty(
        Service(handler.generate, decode_request, encode_chunk),
        _trial(post),
        _shape(post.info),
        borrower=borrower,
        intake=intake,
    )


def _trial(post: Post) -> Probe:
    prober = TrialHandler(post.engine, post.info, post.side_desk)
    return lambda: _exhaust(prober.generate(ONE_TOKEN, _ProbeContext()))


def _shape(info: EngineInfo) -> KvShape | None:
    return info.kv.shape if info.kv is not None else None


_ROLES: dict[str, Callable[[Post], Awaitable[Duty]]] = {
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
