"""The generate ports over `core.py`, on the event loop: requests go to the engine's thread, its results to streams."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from baton.config.engines import ExpertOptions, TorchOptions
from baton.engine_kit.output_stream import OutputStream
from baton.engine_kit.threads import run_in_thread
from baton.engines.torch.diffusion.options import make_plan, without_penalties
from baton.engines.torch.guided import GuideCompiler
from baton.engines.torch.models.config import has_experts
from baton.engines.torch.models.diffusion import is_diffusion
from baton.engines.torch.models.vision_language import has_media
from baton.engines.torch.prompt_media import PromptMedia, check_rows, read_media
from baton.engines.torch.reasoning_guide import ReasoningGuide
from baton.engines.torch.sampling_params import Guide, make_sampling_params
from baton.engines.torch.sequence import Sequence
from baton.engines.torch.thread import EngineThread
from baton.errors import BatonError, Cancelled, ContextTooLong, EngineDead, InvalidRequest, Unsupported
from baton.experts.settings import recorder_mode
from baton.models.defaults import SamplingDefaults, read_defaults
from baton.models.directory import read_config
from baton.models.reasoning import reasoning_end_token
from baton.ports.engine import Capabilities, EngineInfo, HandoffStyle, MediaInfo, Progress, Work
from baton.protocol.commands import Command, DumpExpertRecord, JoinGroup, Outcome, UpdateWeights
from baton.protocol.events import KvEvent, LoadSnapshot, Reading
from baton.protocol.handoff import Consume, Handoff, Produce
from baton.protocol.ids import RequestId
from baton.protocol.outputs import Finished, KvWanted, Logprobs
from baton.protocol.requests import DiffusionOptions
from baton.status.progress_line import ProgressLine

if TYPE_CHECKING:
    from baton.engines.torch.core import Core, StepResult

LOAD_INTERVAL_S = 0.25


class _Running(NamedTuple):
    """What exists between the end of `start` and `stop`."""

    thread: "EngineThread[Core, StepResult]"
    core: "Core"
    guides: GuideCompiler
    info: EngineInfo
    defaults: SamplingDefaults
    vocab_size: int


class TorchEngine:
    """A KvImportEngine (see `ports/engine.py`) for the model in `directory`.

    It moves no KV: it reports which blocks are computed or wanted. With `exports_kv` other processes of this machine
    can map its KV cache and read it. `experts` divides the experts of a mixture-of-experts model.
    """

    def __init__(
        self,
        options: TorchOptions,
        directory: Path,
        name: str,
        exports_kv: bool = False,
        experts: ExpertOptions | None = None,
    ) -> None:
        self._options = options
        self._directory = directory
        self._name = name
        self._exports_kv = exports_kv
        self._experts = experts or ExpertOptions()
        self._records_experts = recorder_mode(self._experts) != "off" and has_experts(directory)
        self._takes_media = has_media(directory)
        self._is_diffusion = is_diffusion(directory)
        self._thread: EngineThread[Core, StepResult] | None = None
        self._running: _Running | None = None
        self._dead: BatonError | None = None
        self._streams: dict[RequestId, OutputStream] = {}
        # Requests that may hold blocks after their stream has ended: produced KV stays until it is aborted.
        self._handoffs: dict[RequestId, Handoff] = {}
        self._compiling: set[RequestId] = set()
        self._arrivals = itertools.count()
        self._kv_events: deque[KvEvent] = deque()
        self._load: LoadSnapshot | None = None
        self._new_readings = asyncio.Event()

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        can = Capabilities(
            media_embeddings=self._takes_media,
            handoff=HandoffStyle.EARLY,
            max_logprobs=20,
            prompt_logprobs=True,
            max_choices=128,
            guided=frozenset({"json", "regex", "choice", "grammar"}),
            guides_after_reasoning=True,
            logit_bias=True,
            bad_words=True,
            memory_tags=frozenset({"kv_cache", "weights"}),
            weight_sources=frozenset({"disk", "tensors", "shared_memory", "group"}),
            pause_modes=frozenset({"abort", "retract", "keep"}),
            clear_cache=True,
            profile=True,
            expert_records=self._records_experts,
        )
        return _without_left_to_right(can) if self._is_diffusion else can

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        config = read_config(self._directory)
        defaults = read_defaults(self._directory)
        if self._is_diffusion:
            defaults = without_penalties(defaults)
        eos = tuple(dict.fromkeys((*config.eos_token_ids, *defaults.eos_token_ids)))
        thread: EngineThread[Core, StepResult] = EngineThread(self._deliver, self._on_end)
        self._thread = thread
        core = await thread.start("torch-engine", self._load_core)
        self._load = core.load()
        media = await run_in_thread("torch-media", lambda: self._media_info(core)) if self._takes_media else None
        info = msgspec.structs.replace(self._describe(core, eos), media=media)
        vocab_size = core.runner.config.vocab
        guides = GuideCompiler(self._directory, vocab_size, eos)
        self._running = _Running(thread, core, guides, info, defaults, vocab_size)
        return info

    def submit(self, work: Work) -> OutputStream:
        """See `GenerateEngine.submit`."""
        running = self._alive()
        self._refuse_impossible(work, running.info)
        media = self._media_of(work, running)
        arrival = next(self._arrivals)
        model = running.core.runner.config.diffusion
        plan = make_plan(work, model, running.info.block_size) if model is not None else None
        choices = [
            Sequence(
                work, index, make_sampling_params(work, running.defaults, running.vocab_size), arrival, media, plan
            )
            for index in range(work.sampling.n or 1)
        ]
        stream = OutputStream(len(choices))
        guided = work.sampling.guided_decoding
        if guided is None or not guided.kinds():
            running.thread.submit(lambda core: core.add(choices))
        else:
            self._compiling.add(work.request_id)
            compiling = running.guides.compile(guided)
            compiling.add_done_callback(lambda done: running.thread.post(self._add_guided, running, choices, done))
        self._streams[work.request_id] = stream
        if isinstance(work.handoff, Produce | Consume):
            self._handoffs[work.request_id] = work.handoff
        return stream

    def received(self, request_id: RequestId) -> None:
        """See `KvImportEngine.received`."""
        if self._running is not None and request_id in self._handoffs:
            self._running.thread.submit(lambda core: core.received(request_id))

    async def abort(self, request_id: RequestId) -> None:
        """See `AbortableEngine.abort`."""
        stream = self._streams.get(request_id)
        if self._running is None or (stream is None and request_id not in self._handoffs):
            return
        self._compiling.discard(request_id)
        try:
            await self._running.thread.call(lambda core: core.abort(request_id))
        except EngineDead:
            return  # its blocks are gone with the engine, and its stream has ended
        finally:  # the abort is queued: it is done even if this call is cancelled
            self._streams.pop(request_id, None)
            self._handoffs.pop(request_id, None)
            if stream is not None:
                stream.fail(Cancelled("aborted"))

    async def execute(self, command: Command) -> Outcome:
        """See `Engine.execute`."""
        running = self._alive()
        if isinstance(command, DumpExpertRecord):
            return await self._dump_experts(running)
        if not isinstance(command, JoinGroup | UpdateWeights):
            return await running.thread.call(lambda core: core.execute(command))
        # These wait for other processes or read much data: steps go on meanwhile.
        finish = await run_in_thread("torch-command", lambda: running.core.prepare(command))
        return await running.thread.call(lambda _: finish())

    async def _dump_experts(self, running: _Running) -> Outcome:
        """Write the record of experts; steps go on meanwhile. What is not written stays recorded."""
        records = await running.thread.call(lambda core: core.records.take())
        path = await run_in_thread("torch-command", lambda: running.core.records.write(records))
        return await running.thread.call(lambda core: core.records.forget(records, path))

    def metrics(self) -> str:
        """See `Engine.metrics`."""
        counter = self._running.core.pass_counter if self._running is not None else None
        return counter.metrics.text() if counter is not None else ""

    def progress(self) -> Progress:
        """See `Engine.progress`."""
        if self._running is None:
            return Progress(0, 0, 0)
        core, known = self._running.core, len(self._streams)
        return Progress(core.steps, min(core.running, known), max(0, known - core.running))

    async def readings(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`."""
        published: LoadSnapshot | None = None
        while self._dead is None or self._kv_events:
            self._new_readings.clear()
            while self._kv_events:
                yield self._kv_events.popleft()
            if self._load is not None and self._load != published:
                yield (published := self._load)
            if not self._kv_events and self._dead is None:
                await self._new_readings.wait()
                if not self._kv_events:
                    await asyncio.sleep(LOAD_INTERVAL_S)  # load alone is published at intervals, not every step

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._end_streams(EngineDead("the engine has stopped"))
        if self._thread is not None:
            await self._thread.stop()
        if self._running is not None:
            self._running.guides.close()
            self._running = None

    def _load_core(self) -> "Core":
        """Runs on the engine's thread: importing torch and reading weights would block the event loop."""
        import torch

        from baton.engines.torch.core import Core
        from baton.engines.torch.runner import Runner

        torch.set_grad_enabled(False)
        with ProgressLine(f"loading {self._name}") as line:
            runner = Runner(
                self._options, self._directory, line.report, exports_kv=self._exports_kv, experts=self._experts
            )
            return Core(runner, self._options)

    def _describe(self, core: "Core", eos_token_ids: tuple[int, ...]) -> EngineInfo:
        runner = core.runner
        return EngineInfo(
            model_name=self._name,
            model_dir=str(self._directory),
            context_length=min(runner.context, runner.blocks * runner.block),
            block_size=runner.block,
            total_blocks=runner.blocks,
            max_running=runner.max_running,
            max_batch_tokens=core.scheduler.batch_tokens,
            vocab_size=runner.config.vocab,
            eos_token_ids=eos_token_ids,
            reasoning_end_token=reasoning_end_token(self._directory),
            kv=None if self._is_diffusion else runner.kv_memory,
        )

    def _media_info(self, core: "Core") -> MediaInfo:
        """Read what identifies the rows that the model takes, which the files of its vision tower say."""
        from baton.engines.torch.vision.model import media_info, read_layout

        return media_info(self._directory, read_layout(self._directory), str(core.runner.dtype).removeprefix("torch."))

    def _alive(self) -> _Running:
        if self._dead is not None or self._running is None:
            raise self._dead or EngineDead("the engine is not running")
        return self._running

    def _refuse_impossible(self, work: Work, info: EngineInfo) -> None:
        if work.request_id in self._streams or work.request_id in self._handoffs:
            raise InvalidRequest(f"request id {work.request_id} is in use")
        blocks = -(-(len(work.token_ids) + work.max_tokens) // info.block_size)
        if blocks > info.total_blocks:
            raise InvalidRequest(f"the request needs {blocks} KV blocks; this engine has {info.total_blocks}")
        if work.require_reasoning and info.reasoning_end_token is None:
            raise Unsupported("require_reasoning: this model has no token that ends reasoning")
        if isinstance(work.handoff, Produce):
            _refuse_more_than_a_prompt(work)

    def _media_of(self, work: Work, running: _Running) -> PromptMedia | None:
        """Return the encoded media of the prompt. Raises InvalidRequest for media that can never be computed."""
        config = running.core.runner.config
        media = read_media(work.media, len(work.token_ids), config.spatial)
        if media is not None:
            check_rows(media, config.hidden)
            if not media.has_rows:
                self._refuse_missing_rows(work, media, running.info.block_size)
            last = len(work.token_ids) + work.max_tokens + media.largest_shift
            if last > running.core.runner.context:
                raise ContextTooLong(
                    f"the media take positions up to {last}; the context has {running.core.runner.context}"
                )
        return media

    def _refuse_missing_rows(self, work: Work, media: PromptMedia, block_size: int) -> None:
        """Without rows, a prompt is continued from KV: only tokens after the media can be computed here."""
        if not isinstance(work.handoff, Consume):
            raise InvalidRequest("media: an item without rows in a prompt that is computed on this worker")
        if media.rows_end == len(work.token_ids):
            raise InvalidRequest("media: a prompt whose KV another worker computes must not end with media")
        if work.output.prompt_logprobs is not None:
            raise Unsupported("prompt_logprobs: not for media that another worker has computed; use aggregated workers")
        # Later choices share full blocks with the first, and compute the rest of the prompt.
        shared = (len(work.token_ids) - 1) // block_size * block_size if self._options.prefix_cache else 0
        if (work.sampling.n or 1) > 1 and media.rows_end > shared:
            raise Unsupported(
                "n: the last KV block of the prompt has media that another worker has computed; use aggregated workers,"
                " or a text after the media"
            )

    def _add_guided(self, running: _Running, choices: list[Sequence], compiled: "Future[Callable[[], Guide]]") -> None:
        """Queue a request whose grammar is compiled, or fail it. It may have been aborted meanwhile."""
        request_id = choices[0].work.request_id
        if request_id not in self._compiling:
            return
        self._compiling.remove(request_id)
        error = compiled.exception()
        if error is not None:
            self._streams.pop(request_id).fail(error)
            return
        for sequence in choices:
            sequence.guide = self._guide(compiled.result()(), sequence.work, running)
        running.thread.submit(lambda core: core.add(choices))

    def _guide(self, guide: Guide, work: Work, running: _Running) -> Guide:
        end = running.info.reasoning_end_token
        return guide if not work.require_reasoning or end is None else ReasoningGuide(guide, end, running.vocab_size)

    def _deliver(self, result: "StepResult") -> None:
        """Pass the result of a step to the streams and the readings."""
        self._deliver_progress(result)
        for sampled in result.sampled:
            stream = self._streams.get(sampled.request_id)
            if stream is not None:
                if sampled.cached_tokens is not None:
                    _push_prompt(stream, sampled.cached_tokens, sampled.prompt_logprobs)
                stream.push([sampled.token], sampled.choice, sampled.logprobs)
                if sampled.finished is not None:
                    self._finish(sampled.request_id, stream, sampled.finished)
        for request_id, error in result.failed:
            if (stream := self._streams.pop(request_id, None)) is not None:
                stream.fail(error)
        self._kv_events += result.kv_events
        self._load = result.load
        self._new_readings.set()

    def _deliver_progress(self, result: "StepResult") -> None:
        """Pass on what was done with prompts, and the blocks of handoffs."""
        for request_id, progress in result.progress:
            if (stream := self._streams.get(request_id)) is not None:
                stream.progressed(progress)
        for request_id, blocks in result.handoff_blocks:
            if (stream := self._streams.get(request_id)) is not None:
                if isinstance(blocks, KvWanted):
                    stream.want(blocks)
                else:
                    stream.computed(blocks)

    def _finish(self, request_id: RequestId, stream: OutputStream, end: Finished) -> None:
        stream.finish(end.reason, end.index, end.stop_reason, end.cached_tokens)
        if stream.finished:  # after an error other choices may go on, until the request is aborted
            del self._streams[request_id]
            if isinstance(self._handoffs.get(request_id), Consume):
                del self._handoffs[request_id]

    def _on_end(self, problem: BaseException | None) -> None:
        if isinstance(problem, BatonError):
            self._end_streams(problem)
        elif problem is not None:
            self._end_streams(EngineDead(f"the engine's thread has died: {problem!r}"))

    def _end_streams(self, error: BatonError) -> None:
        """Fail every stream; no request is accepted after this. The first error stays."""
        self._dead = self._dead or error
        streams, self._streams = self._streams, {}
        self._handoffs.clear()
        self._compiling.clear()
        for stream in streams.values():
            stream.fail(self._dead)
        self._new_readings.set()


def _without_left_to_right(can: Capabilities) -> Capabilities:
    """Return the capabilities with a diffusion language model.

    It has no KV that another worker could continue from, and decides tokens in any order: nothing that depends on the
    tokens before a position applies.
    """
    return msgspec.structs.replace(
        can,
        diffusion=True,
        diffusion_options=frozenset(DiffusionOptions.__struct_fields__) - {"extra"},
        handoff=HandoffStyle.NONE,
        prompt_logprobs=False,
        guided=frozenset(),
        guides_after_reasoning=False,
        logit_bias=False,
        bad_words=False,
    )


def _push_prompt(stream: OutputStream, cached_tokens: int, logprobs: Logprobs | None) -> None:
    stream.cached(cached_tokens)
    if logprobs is not None:
        stream.scored(logprobs)


def _refuse_more_than_a_prompt(work: Work) -> None:
    """Offered blocks must not change, so nothing is computed after the prompt. Raises InvalidRequest."""
    if (work.sampling.n or 1) > 1:
        raise InvalidRequest(f"n: KV is produced for one choice, not {work.sampling.n}")
    if work.max_tokens > 1:
        raise InvalidRequest(f"max_tokens: work that produces KV generates one token, not {work.max_tokens}")
