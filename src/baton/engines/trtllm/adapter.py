"""The generate port over TensorRT-LLM: submits requests to the library, reads its results, and ends with its engine."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import cast

import msgspec

from baton.config.engines import TrtllmOptions
from baton.engine_kit.output_stream import OutputStream
from baton.engine_kit.threads import run_in_thread
from baton.engines.trtllm.cli_args import find, read_arguments
from baton.engines.trtllm.compat import Library
from baton.engines.trtllm.generate_args import GenerateArgs, discard, sent_params
from baton.engines.trtllm.handoff import CONTEXT_ONLY
from baton.engines.trtllm.launch import context_of, make_llm, read_capacity
from baton.engines.trtllm.library_types import GenerateFields13, Llm, Llm13, Result
from baton.engines.trtllm.lifecycle import Lifecycle, Timeouts, load_library
from baton.engines.trtllm.llm_args import (
    DEFAULT_BATCH,
    DEFAULT_STEP_TOKENS,
    KV_TIMEOUT_MS,
    RequestType,
    dp_size,
    number,
    plan_arguments,
)
from baton.engines.trtllm.loras import Loras
from baton.engines.trtllm.media_prompt import MediaPrompts
from baton.engines.trtllm.metrics import EngineMetrics
from baton.engines.trtllm.outputs import ResultReader
from baton.engines.trtllm.params import GUIDES, MAX_CHOICES, MAX_LOGPROBS, Model
from baton.engines.trtllm.readings import Item, Poll, Readings
from baton.engines.trtllm.request import RunningRequest, Submitted
from baton.errors import BatonError, Cancelled, EngineDead, InvalidRequest, Unsupported
from baton.models.defaults import SamplingDefaults, read_defaults
from baton.models.directory import ModelConfig, read_config
from baton.models.placeholders import media_modalities, read_media_info
from baton.models.reasoning import reasoning_end_token
from baton.models.tokenizer import HubTokenizer
from baton.ports.engine import Capabilities, EngineInfo, HandoffStyle, MediaInfo, Progress, Work
from baton.protocol.commands import Command, ListLoras, LoadLora, Outcome, UnloadLora
from baton.protocol.events import Reading
from baton.protocol.handoff import LocalProbe, Produce
from baton.protocol.ids import RequestId, new_request_id
from baton.protocol.requests import StopConditions

log = logging.getLogger(__name__)

EVENTS_INTERVAL_S = 0.02
FULL_SAMPLER = "TRTLLMSampler"
MAX_PREPARING = 8  # requests whose media are preprocessed at once, each on a thread


class _Running(msgspec.Struct, frozen=True, kw_only=True):
    """What exists once the engine has started."""

    library: Library
    llm: Llm
    generate_args: GenerateArgs
    metrics: EngineMetrics
    readings: Readings
    polls: tuple[Poll, ...]

    def close(self) -> None:
        """Poll no more, and end the readings."""
        for poll in self.polls:
            poll.stop()
        self.readings.close()


class TrtllmEngine:
    """A `GenerateEngine` (see `ports/engine.py`) for the model in `model_dir`.

    `request_type` is the library's name for what a disaggregated engine computes: the prompt ("context_only") or the
    output ("generation_only"). None computes both. `args` are the library's own arguments. Raises ConfigError for
    arguments that are wrong for every version of the library.
    """

    def __init__(
        self,
        options: TrtllmOptions,
        args: tuple[str, ...],
        model_dir: Path,
        name: str,
        request_type: RequestType | None = None,
        library: Library | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
    ) -> None:
        self._options = options
        self._tree = plan_arguments(options, read_arguments(args), model_dir, request_type)
        self._model_dir = model_dir
        self._name = name
        self._disaggregated = request_type is not None
        # KV of context-only requests stays in use after the last request has ended here, until it has been read.
        self._idle_frees_kv = request_type != CONTEXT_ONLY
        self._given_library = library
        self._timeouts = timeouts
        self._lifecycle: Lifecycle[Llm] = Lifecycle(timeouts, self._end)
        self._running: _Running | None = None
        self._loras = Loras()
        self._requests: dict[RequestId, RunningRequest] = {}
        # Ended requests whose KV may not have been read yet, each with the time at which the engine frees it.
        self._unread_kv: dict[RequestId, tuple[Result, float]] = {}
        self._steps_of_ended = 0
        self._preparations = asyncio.Semaphore(MAX_PREPARING)
        self._modalities = media_modalities(model_dir)

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        return Capabilities(
            # Autodeploy encodes media itself.
            media_handles=self._options.backend == "pytorch",
            media_embeddings=self._options.backend == "pytorch" and "image" in self._modalities,
            modalities=frozenset({"text"}) | self._modalities,
            handoff=HandoffStyle.LATE if self._disaggregated else HandoffStyle.NONE,
            max_logprobs=MAX_LOGPROBS,
            prompt_logprobs=not self._disaggregated,  # generation-only requests do not compute the prompt
            max_choices=MAX_CHOICES,
            guided=GUIDES if self._tree.get("guided_decoding_backend") else frozenset(),
            max_thinking_tokens=True,  # of models whose end of reasoning the engine knows: it refuses the others
            logit_bias=True,
            lora=bool(self._tree.get("enable_lora") or self._tree.get("lora_config")),
            dp_size=dp_size(self._tree),
        )

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        config, defaults = read_config(self._model_dir), read_defaults(self._model_dir)
        context = context_of(self._tree, config.max_position_embeddings, self._model_dir)
        library = await load_library(self._given_library)
        tree = {**self._tree, "max_seq_len": context}
        llm = await self._lifecycle.build(lambda: make_llm(library, self._options, tree))
        self._loras.add_configured(find(self._tree, "lora_config", "lora_dir"))
        model = self._model(config, defaults, library)
        await self._generate_first_token(llm, GenerateArgs(library, model, self._loras, self._disaggregated, context))
        media_info, media = await run_in_thread("trtllm-tokenizer", lambda: self._media(library))
        blocks, block_size = await run_in_thread("trtllm-capacity", lambda: read_capacity(library, llm))
        self._lifecycle.start_health_checks(llm, library)
        readings = Readings(block_size, blocks, dp_size(self._tree))
        context = min(context, blocks * block_size)
        self._running = _Running(
            library=library,
            llm=llm,
            generate_args=GenerateArgs(library, model, self._loras, self._disaggregated, context, media),
            metrics=EngineMetrics(library, self._name),
            readings=readings,
            polls=self._polls(llm, readings),
        )
        for poll in self._running.polls:
            poll.start()
        return EngineInfo(
            model_name=self._name,
            model_dir=str(self._model_dir),
            context_length=context,
            block_size=block_size,
            total_blocks=blocks,
            max_running=number(self._tree, "max_batch_size", DEFAULT_BATCH) * dp_size(self._tree),
            max_batch_tokens=number(self._tree, "max_num_tokens", DEFAULT_STEP_TOKENS),
            vocab_size=config.vocab_size,
            eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *defaults.eos_token_ids))),
            reasoning_end_token=reasoning_end_token(self._model_dir),
            media=media_info,
            adapters=self._loras.names,
        )

    def submit(self, work: Work) -> OutputStream:
        """See `GenerateEngine.submit`."""
        running = self._alive()
        self._drop_expired()
        if work.request_id in self._requests or work.request_id in self._unread_kv:
            raise InvalidRequest(f"request id {work.request_id} is in use")
        stream = OutputStream(work.sampling.n or 1)
        submitted = None
        if not running.generate_args.needs_preparation(work):
            submitted = self._generate(running.generate_args.build(work), work, stream, running)
        request = RunningRequest(
            work,
            stream,
            lambda error: self._lifecycle.translate(error, running.llm, running.library),
            submitted,
            lambda request: self._prepare(request, running),
        )
        self._requests[work.request_id] = request
        request.task.add_done_callback(lambda _: self._ended(request, running))
        return stream

    async def abort(self, request_id: RequestId) -> None:
        """See `AbortableEngine.abort`.

        No memory of the engine is accessed from outside, so it may free a request later, for example one whose KV is in
        transfer: this call waits up to `Timeouts.abort_s`.
        """
        unread = self._unread_kv.pop(request_id, None)
        if unread is not None:
            _free_kv(request_id, unread[0])
        request = self._requests.get(request_id)
        if request is not None:
            request.abort(Cancelled("aborted"))
            await asyncio.wait([request.task], timeout=self._timeouts.abort_s)
            # The done callback, which removes the request, runs in the next iteration of the loop.
            await asyncio.sleep(0)

    async def execute(self, command: Command) -> Outcome:
        """See `Engine.execute`."""
        self._alive()
        if not isinstance(command, LoadLora | UnloadLora | ListLoras):
            raise Unsupported("the TensorRT-LLM engine has no such command")
        return await self._loras.execute(command, self._wait_for_users)

    def metrics(self) -> str:
        """See `Engine.metrics`."""
        return self._running.metrics.text() if self._running is not None else ""

    def progress(self) -> Progress:
        """See `Engine.progress`."""
        if self._running is None:
            return Progress(0, 0, 0)
        requests, readings = self._requests.values(), self._running.readings
        begun = max(sum(request.running for request in requests), readings.running)
        running = min(begun, len(requests))
        steps = self._steps_of_ended + sum(request.steps for request in requests) + readings.steps
        return Progress(steps, running, len(requests) - running)

    async def readings(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`."""
        if self._running is not None:
            async for reading in self._running.readings.read():
                yield reading

    async def stop(self) -> None:
        """See `Engine.stop`."""
        await self._lifecycle.stop()

    def _model(self, config: ModelConfig, defaults: SamplingDefaults, library: Library) -> Model:
        return Model(
            vocab_size=config.vocab_size,
            defaults=defaults,
            thinking=bool(self._tree.get("reasoning_parser")),
            ignores_options=not library.features.sampler_options and self._tree.get("sampler_type") != FULL_SAMPLER,
        )

    def _media(self, library: Library) -> tuple[MediaInfo | None, MediaPrompts]:
        info = read_media_info(self._model_dir)
        return info, MediaPrompts(library, HubTokenizer(self._model_dir), info)

    async def _generate_first_token(self, llm: Llm, generate_args: GenerateArgs) -> None:
        """Generate one token, to know that the engine works; it reports statistics only after that."""
        work = Work(
            request_id=new_request_id("start"),
            token_ids=(1,),
            max_tokens=1,
            stop=StopConditions(ignore_eos=True),
            handoff=LocalProbe(),
        )

        async def generate() -> None:
            async for _ in llm.generate_async(**generate_args.build(work)):
                pass

        try:
            async with asyncio.timeout(self._timeouts.first_token_s):
                await generate()
        except Exception as error:
            raise EngineDead(f"TensorRT-LLM fails its first request: {error!r}") from error

    def _polls(self, llm: Llm, readings: Readings) -> tuple[Poll, ...]:
        load = Poll(
            "load", lambda timeout_s: llm.get_stats(timeout=timeout_s), self._add_stats, self._options.poll_ms / 1000
        )
        cache = self._tree["kv_cache_config"]
        if not isinstance(cache, dict) or not cache.get("event_buffer_max_size"):
            return (load,)
        if not cache.get("enable_block_reuse", True):
            return (load,)
        events = Poll(
            "KV events",
            lambda timeout_s: llm.get_kv_cache_events(timeout=timeout_s),
            readings.add_events,
            EVENTS_INTERVAL_S,
        )
        return (load, events)

    def _add_stats(self, stats: list[Item]) -> None:
        if self._running is not None:
            self._running.readings.add_stats(stats)
            self._running.metrics.iterations(stats)
            self._report_if_idle(self._running)

    def _alive(self) -> _Running:
        if self._lifecycle.error is not None or self._running is None:
            raise self._lifecycle.error or EngineDead("the engine is not running")
        return self._running

    def _generate(self, args: GenerateFields13, work: Work, stream: OutputStream, running: _Running) -> Submitted:
        try:
            result = running.llm.generate_async(**args)
        except (running.library.request_error, ValueError, TypeError) as error:
            raise InvalidRequest(f"TensorRT-LLM rejects the request: {error}") from error
        except Exception as error:
            raise self._lifecycle.translate(error, running.llm, running.library) from error
        return Submitted(
            result, ResultReader(work, stream, running.library, running.generate_args.context, sent_params(args))
        )

    async def _prepare(self, request: RunningRequest, running: _Running) -> Submitted | None:
        """Preprocess the media of `request` on a thread, and submit it. Returns None if it has been aborted."""
        async with self._preparations:
            request.preparing = True
            llm, build = cast(Llm13, running.llm), running.generate_args.prepare
            args = await run_in_thread("trtllm-media", lambda: build(request.work, llm))
        self._steps_of_ended += 1
        submitted = None
        try:
            if not request.aborted:
                submitted = self._generate(args, request.work, request.stream, running)
        finally:
            if submitted is None:
                await run_in_thread("trtllm-discard", lambda: discard(args["inputs"]))
        return submitted

    async def _wait_for_users(self, lora_name: str) -> None:
        users = [request.task for request in self._requests.values() if request.work.lora_name == lora_name]
        if users:
            await asyncio.wait(users)

    def _ended(self, request: RunningRequest, running: _Running) -> None:
        """The last result has been read, or the engine has ended."""
        self._steps_of_ended += request.steps
        request_id = request.work.request_id
        if self._requests.get(request_id) is request:
            del self._requests[request_id]
        result = request.result
        if result is not None and result.finished:
            if isinstance(request.work.handoff, Produce) and not request.aborted:
                self._unread_kv[request_id] = (result, time.monotonic() + self._kv_timeout_s)
            running.metrics.request_ended(result.metrics_dict)
        self._report_if_idle(running)

    def _report_if_idle(self, running: _Running) -> None:
        if self._idle_frees_kv and not self._requests:
            running.readings.set_idle()

    @property
    def _kv_timeout_s(self) -> float:
        """Seconds after which the engine frees KV that has not been read."""
        timeout_ms = find(self._tree, "cache_transceiver_config", "kv_transfer_timeout_ms")
        return (timeout_ms if isinstance(timeout_ms, int) else KV_TIMEOUT_MS) / 1000

    def _drop_expired(self) -> None:
        now = time.monotonic()
        for request_id in [name for name, (_, free_at) in self._unread_kv.items() if free_at < now]:
            del self._unread_kv[request_id]

    def _end(self, error: BatonError) -> None:
        """The engine has died or stopped: end every stream."""
        requests, self._requests = self._requests, {}
        self._unread_kv.clear()
        for request in requests.values():
            request.stream.fail(error)
            request.task.cancel()
        if self._running is not None:
            self._running.close()


def _free_kv(request_id: RequestId, result: Result) -> None:
    """Best effort: the engine may have forgotten a request that has ended. Then its timeout frees the KV."""
    try:
        result.abort()
    except Exception as error:  # noqa: BLE001 - see above
        log.debug("%s cannot be aborted after its end: %r", request_id, error)
