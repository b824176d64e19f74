"""The Engine port over `core.py`: the event-loop side. It checks requests, hands them to the thread, and outputs on."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from baton.config.engines import TorchOptions
from baton.engine_kit.output_stream import OutputStream
from baton.engine_kit.threads import run_in_thread
from baton.engines.torch.guided import GuideCompiler
from baton.engines.torch.sampling_params import Guide, make_plan
from baton.engines.torch.sequence import Sequence
from baton.engines.torch.thread import EngineThread
from baton.errors import BatonError, Cancelled, EngineDead, InvalidRequest
from baton.models.defaults import SamplingDefaults, read_defaults
from baton.models.directory import read_config
from baton.ports.engine import Capabilities, EngineInfo, HandoffStyle, Progress, Work
from baton.protocol.commands import Command, Outcome
from baton.protocol.events import KvEvent, LoadSnapshot, Reading
from baton.protocol.handoff import Consume, Handoff, Produce
from baton.protocol.ids import RequestId
from baton.protocol.outputs import KvWanted
from baton.status.progress_line import ProgressLine

if TYPE_CHECKING:
    from baton.engines.torch.core import Core, News

LOAD_INTERVAL_S = 0.25


class TorchEngine:
    """An Engine (see `ports/engine.py`) for the model in `directory`.

    It moves no KV by itself: it says where KV is, or is to go. With `lends` other processes of this machine may be
    given its cache to read.
    """

    def __init__(self, options: TorchOptions, directory: Path, name: str, exports_kv: bool = False) -> None:
        self._lends = exports_kv
        self._options = options
        self._directory = directory
        self._name = name
        self._thread: EngineThread[Core, News] = EngineThread(self._deliver, self._on_end)
        self._core: Core | None = None
        self._guides: GuideCompiler | None = None
        self._info: EngineInfo | None = None
        self._dead: BatonError | None = None
        self._defaults = SamplingDefaults()
        self._vocabulary = 0
        self._open: dict[RequestId, OutputStream] = {}
        # Requests that may have blocks after their stream has ended: what was produced is there until it is aborted.
        self._handoffs: dict[RequestId, Handoff] = {}
        self._compiling: set[RequestId] = set()
        self._arrivals = itertools.count()
        self._controlling = False
        self._ordering = asyncio.Lock()
        self._events: deque[KvEvent] = deque()
        self._load: LoadSnapshot | None = None
        self._news = asyncio.Event()

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        return Capabilities(
            handoff=HandoffStyle.EARLY,
            max_logprobs=20,
            prompt_logprobs=True,
            max_choices=128,
            guided=frozenset({"json", "regex", "choice", "grammar"}),
            logit_bias=True,
            memory_tags=frozenset({"kv_cache", "weights"}),
            weight_sources=frozenset({"disk", "tensors", "shared_memory", "group"}),
            pause_modes=frozenset({"abort", "retract", "keep"}),
            clear_cache=True,
            profile=True,
        )

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        config = read_config(self._directory)
        self._defaults = read_defaults(self._directory)
        core = await self._thread.start("torch-engine", self._load_core)
        self._core = core
        self._vocabulary = core.runner.config.vocab
        self._load = core.load()
        eos = dict.fromkeys((*config.eos_token_ids, *self._defaults.eos_token_ids))
        self._guides = GuideCompiler(self._directory, self._vocabulary, tuple(eos))
        self._info = EngineInfo(
            model_name=self._name,
            model_dir=str(self._directory),
            context_length=min(core.runner.context, core.runner.blocks * core.runner.block),
            block_size=core.runner.block,
            total_blocks=core.runner.blocks,
            max_running=self._options.max_running,
            eos_token_ids=tuple(eos),
            kv=core.runner.kv_memory,
        )
        return self._info

    def submit(self, work: Work) -> OutputStream:
        """See `GenerateEngine.submit`."""
        self._refuse_impossible(work, self._alive())
        arrival = next(self._arrivals)
        choices = [
            Sequence(work, index, make_plan(work, index, self._defaults, self._vocabulary), arrival)
            for index in range(work.sampling.n or 1)
        ]
        stream = OutputStream(len(choices))
        guided = work.sampling.guided_decoding
        if guided is None or not guided.kinds():
            self._thread.tell(lambda core: core.add(choices))
        else:
            assert self._guides is not None
            self._compiling.add(work.request_id)
            compiling = self._guides.compile(guided)
            compiling.add_done_callback(lambda done: self._thread.post(self._add_guided, choices, done))
        self._open[work.request_id] = stream
        if isinstance(work.handoff, Produce | Consume):
            self._handoffs[work.request_id] = work.handoff
        return stream

    def received(self, request_id: RequestId) -> None:
        """See `KvImportEngine.received`."""
        if request_id in self._handoffs:
            self._thread.tell(lambda core: core.received(request_id))

    async def abort(self, request_id: RequestId) -> None:
        """See `AbortableEngine.abort`."""
        stream = self._open.get(request_id)
        if stream is None and request_id not in self._handoffs:
            return
        self._compiling.discard(request_id)
        try:
            await self._thread.ask(lambda core: core.abort(request_id))
        except EngineDead:
            return  # what it held is gone with the engine, and its stream has ended
        finally:  # the thread has been told: it aborts even if nobody waits for that any more
            self._open.pop(request_id, None)
            self._handoffs.pop(request_id, None)
            if stream is not None:
                stream.fail(Cancelled("aborted"))

    async def execute(self, command: Command) -> Outcome:
        """See `Engine.execute`."""
        self._alive()
        async with self._ordering:
            core = self._core
            assert core is not None
            finish = await run_in_thread("torch-orders", lambda: core.prepare(command))
            self._controlling = True
            try:
                return await self._thread.ask(lambda _: finish())
            finally:
                self._controlling = False

    def metrics(self) -> str:
        """See `Engine.metrics`."""
        return ""

    def progress(self) -> Progress:
        """See `Engine.progress`."""
        steps, running = (self._core.steps, self._core.running) if self._core else (0, 0)
        if self._controlling:
            return Progress(steps, 0, 0)  # an operator's verb has a deadline of its own; meanwhile no step is due
        return Progress(steps, min(running, len(self._open)), max(0, len(self._open) - running))

    async def readings(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`."""
        told: LoadSnapshot | None = None
        while self._dead is None or self._events:
            self._news.clear()
            while self._events:
                yield self._events.popleft()
            if self._load is not None and self._load != told:
                yield (told := self._load)
            if not self._events and self._dead is None:
                await self._news.wait()
                if not self._events:
                    await asyncio.sleep(LOAD_INTERVAL_S)  # load alone is told now and then, not every step

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._die(EngineDead("the engine has stopped"))
        await self._thread.stop()
        if self._guides is not None:
            self._guides.close()
        self._core = None

    def _load_core(self) -> "Core":
        """Runs on the engine's thread: importing torch and reading weights would block the event loop."""
        import torch

        from baton.engines.torch.core import Core
        from baton.engines.torch.runner import Runner

        torch.set_grad_enabled(False)
        with ProgressLine(f"loading {self._name}") as line:
            return Core(Runner(self._options, self._directory, line.report, exports_kv=self._lends), self._options)

    def _alive(self) -> EngineInfo:
        if self._dead is not None or self._info is None:
            raise self._dead or EngineDead("the engine is not running")
        return self._info

    def _refuse_impossible(self, work: Work, info: EngineInfo) -> None:
        prompt = work.token_ids
        if not prompt:
            raise InvalidRequest("token_ids: the prompt is empty")
        if work.request_id in self._open or work.request_id in self._handoffs:
            raise InvalidRequest(f"request id {work.request_id} is in use")
        for token in (max(prompt), min(prompt)):
            if not 0 <= token < self._vocabulary:
                raise InvalidRequest(f"token_ids: {token} is not a token of this model; it has {self._vocabulary}")
        total = len(prompt) + work.max_tokens
        if total > info.context_length:
            raise InvalidRequest(f"the request needs {total} tokens; the context is {info.context_length}")
        blocks = -(-total // info.block_size)
        if blocks > info.total_blocks:
            raise InvalidRequest(f"the request needs {blocks} KV blocks; this engine has {info.total_blocks}")
        if isinstance(work.handoff, Produce):
            _refuse_more_than_a_prompt(work)

    def _add_guided(self, choices: list[Sequence], compiled: "Future[Callable[[], Guide]]") -> None:
        """The grammar is ready, or wrong; meanwhile the request may have gone."""
        request_id = choices[0].work.request_id
        if request_id not in self._compiling:
            return
        self._compiling.remove(request_id)
        error = compiled.exception()
        if error is not None:
            self._open.pop(request_id).fail(error)
            return
        for sequence in choices:
            sequence.guide = compiled.result()()
        self._thread.tell(lambda core: core.add(choices))

    def _deliver(self, news: "News") -> None:
        """Hand on what one step, or a few commands, have made."""
        for request_id, blocks in news.handed_over:
            if (stream := self._open.get(request_id)) is not None:
                if isinstance(blocks, KvWanted):
                    stream.want(blocks)
                else:
                    stream.computed(blocks)
        for made in news.made:
            stream = self._open.get(made.request_id)
            if stream is None:
                continue
            stream.push([made.token], made.choice, made.logprobs)
            if (end := made.finished) is not None:
                stream.finish(end.reason, end.index, end.stop_reason, end.cached_tokens, end.prompt_logprobs)
                if stream.ended:
                    del self._open[made.request_id]
                    if isinstance(self._handoffs.get(made.request_id), Consume):
                        del self._handoffs[made.request_id]
        for request_id, error in news.failed:
            if (stream := self._open.pop(request_id, None)) is not None:
                stream.fail(error)
        self._events += news.events
        self._load = news.load
        self._news.set()

    def _on_end(self, problem: BaseException | None) -> None:
        if isinstance(problem, BatonError):
            self._die(problem)
        elif problem is not None:
            self._die(EngineDead(f"the engine's thread has died: {problem!r}"))

    def _die(self, error: BatonError) -> None:
        """End every stream; the first reason stays."""
        self._dead = self._dead or error
        streams, self._open = self._open, {}
        self._handoffs.clear()
        self._compiling.clear()
        for stream in streams.values():
            stream.fail(self._dead)
        self._news.set()


def _refuse_more_than_a_prompt(work: Work) -> None:
    """What is lent must not change, so nothing is computed after it. Raises InvalidRequest."""
    if (work.sampling.n or 1) > 1:
        raise InvalidRequest(f"n: KV is computed for one choice, not {work.sampling.n}")
    if work.max_tokens > 1:
        raise InvalidRequest(f"max_tokens: work that computes KV for others makes one token, not {work.max_tokens}")
