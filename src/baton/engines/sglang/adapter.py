"""The engine ports over SGLang: `SglangEngine` generates, `SglangEmbedder` embeds. Both run one `SglangHost`.

`SglangEncoder` in `encoder.py` encodes media for other workers.
"""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from baton.config.engines import ExpertOptions, SglangOptions
from baton.engine_kit.output_stream import OutputStream
from baton.engines.sglang.commands import Commands
from baton.engines.sglang.compat import import_sglang
from baton.engines.sglang.embed_requests import EmbedRequests
from baton.engines.sglang.engine_info import default_priority
from baton.engines.sglang.host import SglangHost, Started
from baton.engines.sglang.launch_mode import LaunchMode
from baton.engines.sglang.own_media import OwnMedia, open_own_media
from baton.engines.sglang.params import Setting
from baton.engines.sglang.requests import Requests
from baton.engines.sglang.sglang_types import Manager
from baton.engines.sglang.warmup import warm_up
from baton.errors import EngineDead, Unsupported
from baton.ports.engine import Capabilities, EmbedWork, Encoded, EncodeWork, EngineInfo, Progress, Work
from baton.protocol.commands import Command, Outcome
from baton.protocol.events import Reading
from baton.protocol.ids import RequestId


class _Generating(NamedTuple):
    """What exists while the engine serves requests."""

    requests: Requests
    commands: Commands
    media: OwnMedia | None


class SglangEngine:
    """A GenerateEngine and an EncodeEngine (see `ports/engine.py`); the arguments are those of `SglangHost`."""

    def __init__(
        self,
        options: SglangOptions,
        args: tuple[str, ...],
        model_dir: Path,
        name: str,
        mode: LaunchMode,
        experts: ExpertOptions | None = None,
        from_encoders: bool = False,
    ) -> None:
        self._host = SglangHost(options, args, model_dir, name, mode, experts, from_encoders)
        self._serving: _Generating | None = None
        self._executing = asyncio.Lock()

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        return self._host.capabilities

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        started = await self._host.start()
        if started.manager is None:
            return started.info
        media = await open_own_media(self._host.model_dir, started.manager, self.capabilities)
        requests = Requests(started.manager, _generate_request(), self._setting(started, started.manager))
        self._host.on_death(requests.abandon)
        self._host.before_stop(lambda: requests.close(EngineDead("the engine has stopped")))
        commands = Commands(
            started.manager,
            requests,
            self.capabilities,
            self._host.model_dir,
            started.facts.values,
            self._host.options.group_backend,
        )
        self._serving = _Generating(requests, commands, media)
        if self._host.mode.disaggregation == "prefill":
            dp_size = self._host.arguments.dp_size
            await self._host.or_death(warm_up(requests, dp_size, started.facts.vocab_size))
        return msgspec.structs.replace(started.info, media=None if media is None else media.info)

    def submit(self, work: Work) -> OutputStream:
        """See `GenerateEngine.submit`."""
        return self._alive().requests.submit(work)

    async def abort(self, request_id: RequestId) -> None:
        """See `AbortableEngine.abort`."""
        if self._serving is not None:
            await self._serving.requests.abort(request_id)

    async def encode(self, work: EncodeWork) -> Encoded:
        """See `EncodeEngine.encode`."""
        media = self._alive().media
        if media is None:
            raise Unsupported("the model takes no media")
        return await media.encode(work)

    async def execute(self, command: Command) -> Outcome:
        """See `Engine.execute`."""
        commands = self._alive().commands

        async def execute() -> Outcome:
            async with self._executing:
                self._host.check_alive()
                try:
                    return await self._host.or_death(commands.execute(command))
                except EngineDead as error:
                    self._host.die(error)
                    raise

        # A command that has begun is completed even if its caller is cancelled.
        return await asyncio.shield(asyncio.create_task(execute()))

    def metrics(self) -> str:
        """See `Engine.metrics`."""
        return self._host.metrics()

    def progress(self) -> Progress:
        """See `Engine.progress`."""
        if self._serving is None:
            return Progress(self._host.steps, 0, 0)
        requests = self._serving.requests
        return Progress(self._host.steps + requests.steps, requests.running, requests.waiting)

    def readings(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`."""
        return self._host.readings()

    async def stop(self) -> None:
        """See `Engine.stop`."""
        await self._host.stop()

    def _alive(self) -> _Generating:
        self._host.check_alive()
        if self._serving is None:
            raise EngineDead("the engine is not running")
        return self._serving

    def _setting(self, started: Started, manager: Manager) -> Setting:
        facts = started.facts
        return Setting(
            dialect=import_sglang(),
            needs_bootstrap=self._host.mode.disaggregation != "null",
            guided=self._host.options.guided,
            seeds=bool(facts.values["enable_deterministic_inference"]),
            diffusion=self.capabilities.diffusion,
            context=facts.context,
            grammar_backend=facts.values["grammar_backend"],
            reasoning_end_token=started.info.reasoning_end_token,
            default_priority=default_priority(facts.values),
            defaults=manager.model_config.get_default_sampling_params(),
        )


class SglangEmbedder:
    """An EmbedEngine (see `ports/engine.py`); the arguments are those of `SglangHost`."""

    def __init__(self, options: SglangOptions, args: tuple[str, ...], model_dir: Path, name: str) -> None:
        self._host = SglangHost(options, args, model_dir, name, LaunchMode(embedding=True))
        self._requests: EmbedRequests | None = None

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        return self._host.capabilities

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        started = await self._host.start()
        if started.manager is not None:
            self._requests = EmbedRequests(started.manager, _embedding_request())
        return started.info

    async def embed(self, work: EmbedWork) -> "list[array[float]]":
        """See `EmbedEngine.embed`."""
        self._host.check_alive()
        if self._requests is None:
            raise EngineDead("the engine is not running")
        return await self._host.or_death(self._requests.embed(work))

    async def execute(self, command: Command) -> Outcome:
        """See `Engine.execute`."""
        raise Unsupported("an SGLang engine that embeds takes no commands")

    def metrics(self) -> str:
        """See `Engine.metrics`."""
        return self._host.metrics()

    def progress(self) -> Progress:
        """See `Engine.progress`."""
        requests = self._requests
        if requests is None:
            return Progress(self._host.steps, 0, 0)
        return Progress(self._host.steps + requests.steps, requests.running, 0)

    def readings(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`."""
        return self._host.readings()

    async def stop(self) -> None:
        """See `Engine.stop`."""
        await self._host.stop()


def _generate_request() -> Callable[..., Any]:
    from sglang.srt.managers.io_struct import GenerateReqInput

    request: Callable[..., Any] = GenerateReqInput
    return request


def _embedding_request() -> Callable[..., Any]:
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    request: Callable[..., Any] = EmbeddingReqInput
    return request
