"""The Engine port over TensorRT-LLM: hands requests to the library, reads what comes, watches whether it lives."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from baton.config.engines import TrtllmOptions
from baton.engine_kit.output_stream import OutputStream
from baton.engine_kit.threads import run_in_thread
from baton.engines.trtllm import lifecycle
from baton.engines.trtllm.cli_args import Tree, find, read_arguments
from baton.engines.trtllm.compat import Library, load
from baton.engines.trtllm.generate_args import Calls
from baton.engines.trtllm.launch import context_of, make_llm, read_capacity
from baton.engines.trtllm.library_types import Llm, Result
from baton.engines.trtllm.llm_args import DEFAULT_BATCH, KV_TAKEN_MS, dp_size, number, plan_arguments
from baton.engines.trtllm.loras import Loras
from baton.engines.trtllm.metrics import EngineMetrics
from baton.engines.trtllm.outputs import ResultReader
from baton.engines.trtllm.params import GUIDES, MAX_CHOICES, MAX_LOGPROBS, Model
from baton.engines.trtllm.polls import Item, Poll
from baton.engines.trtllm.readings import Readings
from baton.engines.trtllm.request import RunningRequest
from baton.errors import BatonError, Cancelled, ConfigError, EngineDead, InvalidRequest, Unsupported
from baton.models.defaults import read_defaults
from baton.models.directory import ModelConfig, read_config
from baton.ports.engine import (
    Capabilities,
    EngineInfo,
    HandoffStyle,
    Progress,
    Work,
)
from baton.protocol.commands import Command, ListLoras, LoadLora, Outcome, UnloadLora
from baton.protocol.events import Reading
from baton.protocol.handoff import LocalProbe, Produce
from baton.protocol.ids import RequestId, new_request_id
from baton.protocol.requests import StopConditions

log = logging.getLogger(__name__)

PARTS = ("whole", "prefill", "decode")
EVENTS_PACE_S = 0.02
FIRST_ANSWER_S = 120.0
ABORT_S = 5.0


class TrtllmEngine:
    """An Engine (see `ports/engine.py`) for the model in `model_dir`.

    `part` says what of a request it does: "whole", or the "prefill" or "decode" of one that is handed over late.
    `args` go to the library itself. Raises ConfigError for arguments that cannot be right, whatever the library.
    """

    def __init__(
        self,
        options: TrtllmOptions,
        args: tuple[str, ...],
        model_dir: Path,
        name: str,
        part: str,
        library: Library | None = None,
    ) -> None:
        if part not in PARTS:
            raise ConfigError(f"this engine of TensorRT-LLM cannot {part}; it can be: {', '.join(PARTS)}")
        self._options = options
        self._tree = plan_arguments(options, read_arguments(args), model_dir, part)
        self._model_dir = model_dir
        self._name = name
        self._part = part
        self._library = library
        self._llm: Llm | None = None
        self._calls: Calls | None = None
        self._info: EngineInfo | None = None
        self._metrics: EngineMetrics | None = None
        self._readings: Readings | None = None
        self._dead: BatonError | None = None
        self._loras = Loras()
        self._open: dict[RequestId, RunningRequest] = {}
        # Prefills whose KV may not have been taken yet, and until when that can be.
        self._lent: dict[RequestId, tuple[Result, float]] = {}
        self._steps_ended = 0
        self._polls: list[Poll] = []
        self._watching: asyncio.Task[None] | None = None
        self._stopping = asyncio.Lock()

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        return Capabilities(
            media_handles=self._options.backend == "pytorch",  # autodeploy encodes for itself
            handoff=HandoffStyle.NONE if self._part == "whole" else HandoffStyle.LATE,
            max_logprobs=MAX_LOGPROBS,
            prompt_logprobs=self._part == "whole",  # who only decodes has not computed the prompt
            max_choices=MAX_CHOICES,
            guided=GUIDES if self._tree.get("guided_decoding_backend") else frozenset(),
            logit_bias=True,
            lora=self._has_lora,
            dp_size=dp_size(self._tree),
        )

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        config, defaults = read_config(self._model_dir), read_defaults(self._model_dir)
        context = context_of(self._tree, config.max_position_embeddings, self._model_dir)
        library = self._library if self._library is not None else await run_in_thread("trtllm-import", load)
        self._library = library
        llm = await run_in_thread("trtllm-start", lambda: self._make(library, {**self._tree, "max_seq_len": context}))
        self._load_given_loras()
        model = Model(
            vocabulary=config.vocab_size, defaults=defaults, thinking=bool(self._tree.get("reasoning_parser"))
        )
        self._calls = Calls(library, model, self._loras, hands_over=self._part != "whole")
        await self._answer_once(llm)
        blocks, block_size = await run_in_thread("trtllm-capacity", lambda: read_capacity(library, llm))
        self._metrics = EngineMetrics(library, self._name)
        self._readings = Readings(block_size, blocks, dp_size(self._tree))
        self._info = self._describe(
            config, min(context, blocks * block_size), block_size, blocks, defaults.eos_token_ids
        )
        self._watch(llm)
        return self._info

    def submit(self, work: Work) -> OutputStream:
        """See `GenerateEngine.submit`."""
        info = self._alive()
        assert self._calls is not None
        self._forget_taken()
        if work.request_id in self._open or work.request_id in self._lent:
            raise InvalidRequest(f"request id {work.request_id} is in use")
        self._calls.refuse_impossible(work, info)
        result = self._call(work)
        assert self._library is not None
        stream = OutputStream(work.sampling.n or 1)
        reader = ResultReader(work, stream, self._library)
        request = RunningRequest(work, result, reader, stream, self._translate)
        self._open[work.request_id] = request
        request.task.add_done_callback(lambda _: self._ended(request))
        return stream

    async def abort(self, request_id: RequestId) -> None:
        """See `AbortableEngine.abort`.

        The engine lends no memory, so a request that it is slow to let go of, for its KV is on its way, harms nobody:
        after `ABORT_S` it is left to end by itself.
        """
        lent = self._lent.pop(request_id, None)
        if lent is not None:
            self._give_back(lent[0])
        request = self._open.get(request_id)
        if request is not None:
            request.give_up(Cancelled("aborted"))
            await asyncio.wait([request.task], timeout=ABORT_S)
            # Its end is told by a callback, which runs in the turn after.
            await asyncio.sleep(0)

    async def execute(self, command: Command) -> Outcome:
        """See `Engine.execute`."""
        self._alive()
        if not isinstance(command, LoadLora | UnloadLora | ListLoras) or not self._has_lora:
            raise Unsupported("the TensorRT-LLM engine cannot be ordered to do that")
        match command:
            case LoadLora():
                self._loras.add(command.name, Path(command.path))
                message = f"{command.name} can be used; it is read with its first request"
            case UnloadLora():
                self._loras.remove(command.name)
                users = [request.task for request in self._open.values() if request.work.lora_name == command.name]
                if users:
                    await asyncio.wait(users)
                message = f"{command.name} cannot be used any more"
            case ListLoras():
                message = f"{len(self._loras.names)} adapters"
        return Outcome(message=message, adapters=self._loras.names)

    def metrics(self) -> str:
        """See `Engine.metrics`."""
        return self._metrics.text() if self._metrics is not None else ""

    def progress(self) -> Progress:
        """See `Engine.progress`."""
        if self._readings is None:
            return Progress(0, 0, 0)
        requests = self._open.values()
        begun = max(sum(request.running for request in requests), self._readings.running)
        running = min(begun, len(requests))
        steps = self._steps_ended + sum(request.steps for request in requests) + self._readings.steps
        return Progress(steps, running, len(requests) - running)

    async def readings(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`."""
        if self._readings is not None:
            async for reading in self._readings.read():
                yield reading

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._die(EngineDead("the engine has stopped"))
        async with self._stopping:
            if self._watching is not None:
                self._watching.cancel()
                await asyncio.wait([self._watching])
                self._watching = None
            llm, self._llm = self._llm, None
            if llm is not None:
                await lifecycle.shut_down(llm)

    @property
    def _kept_s(self) -> float:
        """How long the engine keeps KV that nobody takes."""
        kept_ms = find(self._tree, "cache_transceiver_config", "kv_transfer_timeout_ms")
        return (kept_ms if isinstance(kept_ms, int) else KV_TAKEN_MS) / 1000

    @property
    def _has_lora(self) -> bool:
        return bool(self._tree.get("enable_lora") or self._tree.get("lora_config"))

    def _make(self, library: Library, tree: Tree) -> Llm:
        """On a thread: whoever waits for it may have gone when it is done."""
        llm = make_llm(library, self._options, tree)
        self._llm = llm
        if self._dead is not None:
            llm.shutdown()
            raise self._dead
        return llm

    def _load_given_loras(self) -> None:
        given = find(self._tree, "lora_config", "lora_dir")
        for path in given if isinstance(given, list) else ():
            try:
                self._loras.add(Path(path).name, Path(path))
            except InvalidRequest as error:
                raise ConfigError(f"lora_config.lora_dir: {error.message}") from error

    async def _answer_once(self, llm: Llm) -> None:
        """Have the engine make one token: then it works, and from then on it tells about itself."""
        work = Work(
            request_id=new_request_id("start"),
            token_ids=(1,),
            max_tokens=1,
            stop=StopConditions(ignore_eos=True),
            handoff=LocalProbe(),
        )
        assert self._calls is not None

        async def answer() -> None:
            assert self._calls is not None
            async for _ in llm.generate_async(**self._calls.fields(work)):
                pass

        try:
            await asyncio.wait_for(answer(), FIRST_ANSWER_S)
        except Exception as error:
            raise EngineDead(f"TensorRT-LLM does not answer its first request: {error!r}") from error

    def _describe(
        self, config: ModelConfig, context: int, block_size: int, blocks: int, ends: tuple[int, ...]
    ) -> EngineInfo:
        return EngineInfo(
            model_name=self._name,
            model_dir=str(self._model_dir),
            context_length=context,
            block_size=block_size,
            total_blocks=blocks,
            max_running=number(self._tree, "max_batch_size", DEFAULT_BATCH) * dp_size(self._tree),
            eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ends))),
        )

    def _watch(self, llm: Llm) -> None:
        assert self._readings is not None
        pace_s = self._options.poll_ms / 1000
        self._polls = [Poll("load", lambda wait_s: llm.get_stats(timeout=wait_s), self._take_stats, pace_s)]
        cache = self._tree["kv_cache_config"]
        if isinstance(cache, dict) and cache.get("event_buffer_max_size") and cache.get("enable_block_reuse", True):
            ask = lambda wait_s: llm.get_kv_cache_events(timeout=wait_s)  # noqa: E731
            self._polls.append(Poll("KV events", ask, self._readings.take_events, EVENTS_PACE_S))
        for poll in self._polls:
            poll.start()
        assert self._library is not None
        self._watching = asyncio.create_task(lifecycle.watch(llm, self._library, self._die), name="trtllm-health")

    def _take_stats(self, stats: list[Item]) -> None:
        if self._readings is not None and self._metrics is not None:
            self._readings.take_stats(stats)
            self._metrics.iterations(stats)
            self._tell_if_idle()

    def _alive(self) -> EngineInfo:
        if self._dead is not None or self._info is None:
            raise self._dead or EngineDead("the engine is not running")
        return self._info

    def _call(self, work: Work) -> Result:
        assert self._calls is not None
        assert self._llm is not None
        assert self._library is not None
        fields = self._calls.fields(work)
        try:
            return self._llm.generate_async(**fields)
        except (self._library.request_error, ValueError, TypeError) as error:
            raise InvalidRequest(f"TensorRT-LLM refuses the request: {error}") from error
        except Exception as error:
            raise self._translate(error) from error

    def _translate(self, error: Exception) -> BatonError:
        """Return what an error of the library means; one that means the end of the engine ends it for all."""
        assert self._library is not None
        meant = lifecycle.meaning(error, self._llm, self._library)
        if self._dead is None and isinstance(meant, EngineDead):
            self._die(meant)
        return meant if self._dead is None or isinstance(error, self._library.request_error) else self._dead

    def _ended(self, request: RunningRequest) -> None:
        """Its last result has come, or there will be none."""
        self._steps_ended += request.steps
        request_id = request.work.request_id
        if self._open.get(request_id) is request:
            del self._open[request_id]
        if isinstance(request.work.handoff, Produce) and request.result.finished and not request.given_up:
            self._lent[request_id] = (request.result, time.monotonic() + self._kept_s)
        if self._metrics is not None and request.result.finished:
            self._metrics.request_ended(request.result.metrics_dict)
        self._tell_if_idle()

    def _tell_if_idle(self) -> None:
        # A prefill's KV may wait for the other side when no request is left here.
        if not self._open and self._part != "prefill" and self._readings is not None:
            self._readings.idle()

    def _forget_taken(self) -> None:
        """KV that has not been taken in its time has been given up by the engine itself."""
        now = time.monotonic()
        for request_id in [name for name, (_, until) in self._lent.items() if until < now]:
            del self._lent[request_id]

    def _give_back(self, result: Result) -> None:
        """Best effort: an engine that has told the last result may not know the request any more."""
        try:
            result.abort()
        except Exception as error:  # noqa: BLE001 - then its time limit gives the KV back
            log.debug("a prefill cannot be aborted after its end: %r", error)

    def _die(self, error: BatonError) -> None:
        """End every stream; the first reason stays."""
        self._dead = self._dead or error
        for poll in self._polls:
            poll.stop()
        requests, self._open = self._open, {}
        self._lent.clear()
        for request in requests.values():
            request.stream.fail(self._dead)
            request.task.cancel()
        if self._readings is not None:
            self._readings.close()
