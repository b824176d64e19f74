"""The Engine port over SGLang: what is asked of the engine goes in here, and what it tells comes out.

SGLang's front half, its TokenizerManager, lives in this process and on our event loop; schedulers and detokenizer are
processes of their own. We run its receiving loop ourselves: SGLang's way of running it takes over the signals of this
process, and kills it when something fails.
"""

import asyncio
import functools
import logging
import os
import signal
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from baton.config.engines import ExpertOptions, SglangOptions
from baton.engine_kit.output_stream import OutputStream
from baton.engines.sglang.commands import Controls
from baton.engines.sglang.compat import choose_device, import_sglang
from baton.engines.sglang.embed_requests import Embedder
from baton.engines.sglang.engine_info import Facts, capabilities_of, engine_info, facts_of
from baton.engines.sglang.sglang_types import Engine as Foreign
from baton.engines.sglang.sglang_types import Manager
from baton.engines.sglang.launch import Launch, close_sockets
from baton.engines.sglang.metrics import EngineMetrics
from baton.engines.sglang.launch_mode import Part
from baton.engines.sglang.params import Setting
from baton.engines.sglang.tcp_ports import free_port, is_free
from baton.engines.sglang.readings import EventSockets, News, Watch, first_loads
from baton.engines.sglang.requests import Requests
from baton.engines.sglang.server_args import check_arguments, make_server_args
from baton.engines.sglang.warmup import warm_up
from baton.errors import BatonError, ConfigError, ContextTooLong, EngineDead, InvalidRequest, Unsupported
from baton.ports.engine import Capabilities, EmbedWork, EngineInfo, Progress, Work
from baton.protocol.commands import Command, Outcome
from baton.protocol.events import KvEvent, LoadSnapshot, Reading
from baton.protocol.handoff import Produce
from baton.protocol.ids import RequestId

STARTS = 2

T = TypeVar("T")

log = logging.getLogger(__name__)


class SglangEngine:
    """An Engine (see `ports/engine.py`) for the model in `model_dir`, of which it does `part`.

    `args` are SGLang's own. The constructor imports SGLang, which takes seconds, and raises ConfigError for arguments
    that it does not accept. A process has one engine at a time.
    """

    def __init__(
        self,
        options: SglangOptions,
        args: tuple[str, ...],
        model_dir: Path,
        name: str,
        part: Part,
        experts: ExpertOptions | None = None,
    ) -> None:
        choose_device(args)
        self._options = options
        self._model_dir = model_dir
        self._name = name
        self._part = part
        self._arguments = check_arguments(part, options, args, model_dir, name, experts)
        self._capabilities = capabilities_of(part, options, self._arguments, model_dir)
        self._launch: Launch | None = None
        self._manager: Manager | None = None
        self._facts: Facts | None = None
        self._requests: Requests | None = None
        self._embedder: Embedder | None = None
        self._controls: Controls | None = None
        self._sockets: EventSockets | None = None
        self._watch: Watch | None = None
        self._metrics: EngineMetrics | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._ordering = asyncio.Lock()
        self._stopping = asyncio.Lock()
        self._dead: BatonError | None = None
        self._death = asyncio.Event()
        self._stopped = False
        self._steps = 0
        self._events: deque[KvEvent] = deque()
        self._loads: dict[int, LoadSnapshot] = {}
        self._news = asyncio.Event()

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        return self._capabilities

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                engine, sockets = await self._start_processes()
                return await self._take_over(engine, sockets)
        except TimeoutError:
            raise EngineDead(f"SGLang did not start within {self._options.start_timeout_s:g} s") from None

    def submit(self, work: Work) -> OutputStream:
        """See `GenerateEngine.submit`."""
        requests, facts = self._alive()
        self._refuse_impossible(work, facts)
        return requests.submit(work)

    async def abort(self, request_id: RequestId) -> None:
        """See `AbortableEngine.abort`."""
        if self._requests is not None and self._dead is None:
            await self._requests.abort(request_id)

    async def embed(self, work: EmbedWork) -> "list[array[float]]":
        """See `EmbedEngine.embed`."""
        self._alive()
        if self._part != "embed" or self._embedder is None:
            raise Unsupported(f"{self._name} generates; it does not embed")
        return await self._or_death(self._embedder.embed(work))

    async def execute(self, command: Command) -> Outcome:
        """See `Engine.execute`."""
        self._alive()
        assert self._controls is not None
        controls = self._controls

        async def execute() -> Outcome:
            async with self._ordering:
                self._alive()
                return await self._or_death(controls.execute(command))

        # What has begun is seen through, whoever still waits for it.
        return await asyncio.shield(asyncio.create_task(execute()))

    def metrics(self) -> str:
        """See `Engine.metrics`."""
        return self._metrics.text() if self._metrics is not None and self._options.metrics else ""

    def progress(self) -> Progress:
        """See `Engine.progress`."""
        requests, embedder = self._requests, self._embedder
        if requests is None or embedder is None:
            return Progress(self._steps, 0, 0)
        return Progress(
            self._steps + requests.steps + embedder.steps, requests.running + embedder.running, requests.waiting
        )

    async def readings(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`. Raises EngineDead when the engine has died by itself."""
        told: dict[int, LoadSnapshot] = {}
        while True:
            self._news.clear()
            while self._events:
                yield self._events.popleft()
            for rank, load in tuple(self._loads.items()):
                if told.get(rank) != load:
                    told[rank] = load
                    yield load
            if self._events:
                continue
            if self._dead is not None:
                break
            await self._news.wait()
        if not self._stopped:
            raise self._dead

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._stopped = True
        self._die(EngineDead("the engine has stopped"))
        async with self._stopping:
            if self._requests is not None:
                await self._requests.close(EngineDead("the engine has stopped"))
            if self._receiving is not None:
                self._receiving.cancel()
                await asyncio.wait([self._receiving])
            if self._watch is not None:
                await self._watch.stop()
            if self._sockets is not None:
                self._sockets.close()
            if self._manager is not None:
                close_sockets(self._manager)
                self._manager = None
            if self._launch is not None:
                await self._launch.stop()
                self._launch = None
            if self._metrics is not None:
                self._metrics.close()
                self._metrics = None
            self._mind_sigquit(False)

    # Starting

    async def _start_processes(self) -> tuple[Foreign, EventSockets]:
        """Start SGLang, once more if somebody else has taken its port meanwhile. Raises ConfigError or EngineDead."""
        self._mind_sigquit(True)
        self._metrics = EngineMetrics()
        for last in (*(False,) * (STARTS - 1), True):
            given = self._arguments.values["kv_events_config"]
            ranks = self._arguments.local_ranks if self._part != "embed" else ()
            sockets = self._sockets = EventSockets(ranks, given)
            try:
                port = self._meeting_port()
                more: dict[str, object] = {"kv_events_config": sockets.config} if sockets.config else {}
                more |= {"disaggregation_bootstrap_port": port} if port is not None else {}
                self._launch = Launch(functools.partial(make_server_args, self._arguments, more))
                self._metrics.directory = self._launch.directory
                return await self._launch.start(), sockets
            except EngineDead:
                if last or port is None or is_free(self._bind_host, port):
                    raise
                sockets.close()
                log.warning("port %d was taken by somebody else; SGLang is started again with another", port)
                if self._launch is not None:
                    await self._launch.stop()
        raise AssertionError("the last start returns or raises")

    @property
    def _bind_host(self) -> str:
        return str(self._arguments.values["host"])

    def _meeting_port(self) -> int | None:
        """Return a port for engines to meet at, unless one was given or none is needed."""
        if self._part != "prefill" or not self._arguments.leader:
            return None
        if "disaggregation_bootstrap_port" in self._arguments.given:
            given = int(self._arguments.values["disaggregation_bootstrap_port"])
            if not is_free(self._bind_host, given):
                raise ConfigError(f"--disaggregation-bootstrap-port: {given} is in use at {self._bind_host}")
            return None
        return free_port(self._bind_host)

    async def _take_over(self, engine: Foreign, sockets: EventSockets) -> EngineInfo:
        """Take SGLang's front half into our event loop, and begin to listen."""
        loop = asyncio.get_running_loop()
        manager = self._manager = engine.tokenizer_manager
        reader = manager.load_snapshot_reader if manager is not None else None
        if manager is not None:
            manager.event_loop = loop  # SGLang starts no loop of its own where there is one
            self._receiving = asyncio.create_task(manager.handle_loop(), name="sglang-receiving")
            self._receiving.add_done_callback(self._on_receiving_done)
        snapshots = await first_loads(reader)
        if self._dead is not None:
            raise self._dead
        facts = self._facts = facts_of(engine, snapshots)
        info = engine_info(facts, self._part, self._options, self._arguments, self._model_dir, self._name)
        if manager is not None:
            self._begin(manager, facts)
        self._loads = {
            rank: LoadSnapshot(0, 0, 0, info.total_blocks, rank)
            for rank in (range(self._arguments.dp_size) if manager is not None else ())
        }
        self._watch = Watch(reader, sockets, engine.get_all_child_pids(), facts.page, self._on_news, self._on_death)
        if self._part == "prefill" and self._requests is not None:
            await self._or_death(warm_up(self._requests, self._arguments.dp_size, facts.vocabulary))
        return info

    def _begin(self, manager: Manager, facts: Facts) -> None:
        from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

        setting = Setting(
            dialect=import_sglang(),
            part=self._part,
            guided=self._options.guided,
            seeds=bool(facts.values["enable_deterministic_inference"]),
            diffusion=self._capabilities.diffusion,
            grammar_backend=facts.values["grammar_backend"],
            defaults=manager.model_config.get_default_sampling_params(),
        )
        self._requests = Requests(manager, GenerateReqInput, setting)
        self._embedder = Embedder(manager, EmbeddingReqInput, facts.vocabulary, facts.longest_prompt)
        self._controls = Controls(manager, self._requests, self._capabilities, self._model_dir, facts.values)

    # Ending

    def _mind_sigquit(self, mind: bool) -> None:
        """A process of SGLang that fails sends SIGQUIT to its parent, which would end us on the spot."""
        loop = asyncio.get_running_loop()
        with suppress(ValueError, RuntimeError):  # this loop is not the main thread's, which alone gets signals
            if mind:
                loop.add_signal_handler(signal.SIGQUIT, self._on_death, "a process of SGLang has failed; see its log")
            else:
                loop.remove_signal_handler(signal.SIGQUIT)
        if not mind:
            os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)

    def _on_receiving_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._die(EngineDead(f"SGLang's front half has failed: {task.exception()!r}"))

    def _on_death(self, message: str) -> None:
        self._die(EngineDead(message))

    def _die(self, error: BatonError) -> None:
        """End every stream; the first reason stays."""
        if self._dead is None:
            self._dead = error
            if not self._stopped:
                log.error("%s", error.message)
            self._death.set()
            if self._requests is not None:
                self._requests.abandon(error)
        self._news.set()

    # Working

    def _alive(self) -> tuple[Requests, Facts]:
        if self._dead is not None or self._requests is None or self._facts is None:
            raise self._dead or EngineDead("the engine is not running")
        return self._requests, self._facts

    async def _or_death(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns. Raises EngineDead when the engine dies first."""
        task, death = asyncio.ensure_future(work), asyncio.ensure_future(self._death.wait())
        try:
            await asyncio.wait([task, death], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            assert self._dead is not None
            raise self._dead
        finally:
            for unfinished in (task, death):
                unfinished.cancel()
            await asyncio.wait([task, death])

    def _refuse_impossible(self, work: Work, facts: Facts) -> None:
        prompt = work.token_ids
        if not self._capabilities.generate:
            raise Unsupported(f"{self._name} embeds; it does not generate")
        if not prompt:
            raise InvalidRequest("token_ids: the prompt is empty")
        for token in (max(prompt), min(prompt)):
            if not 0 <= token < facts.vocabulary:
                raise InvalidRequest(f"token_ids: {token} is not a token of this model; it has {facts.vocabulary}")
        if len(prompt) > facts.longest_prompt or len(prompt) + work.max_tokens > facts.context:
            raise ContextTooLong(
                f"a prompt of {len(prompt)} tokens and {work.max_tokens} more: this engine takes {facts.longest_prompt}"
                f" and {facts.context} together"
            )
        if isinstance(work.handoff, Produce):
            if (work.sampling.n or 1) > 1:
                raise InvalidRequest(f"n: KV is computed for one choice, not {work.sampling.n}")
            if work.max_tokens > 1:
                raise InvalidRequest(f"max_tokens: work for others makes one token, not {work.max_tokens}")

    def _on_news(self, news: News) -> None:
        self._steps += news.steps
        self._events += news.events
        self._loads.update((load.dp_rank, load) for load in news.loads)
        self._news.set()
