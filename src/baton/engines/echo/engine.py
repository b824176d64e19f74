"""The echo engine: repeats the prompt, one token a step, and behaves like a real engine otherwise.

With `max_tokens` it repeats the prompt until that many tokens are generated; without, it generates the prompt once.
Choice i starts i tokens later. A script replaces the echo of some prompts by an answer. Blocks are reserved for the
whole output at admission: nothing is preempted.
"""

import asyncio
import itertools
import re
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import NamedTuple

from baton.config.engines import EchoOptions
from baton.engine_kit.block_hash import event_hash
from baton.engine_kit.kv_ledger import KvLedger
from baton.engine_kit.output_stream import OutputStream
from baton.engines.echo.blocks import BLOCK, BlockPool, HeldBlocks
from baton.engines.echo.images import image_sizes, with_image_sizes
from baton.engines.echo.script import read_script
from baton.errors import BatonError, Cancelled, EngineDead, EngineFailed, InvalidRequest, Unsupported
from baton.models.directory import read_config
from baton.models.reasoning import reasoning_end_token
from baton.ports.engine import Capabilities, Encoded, EncodeWork, EngineInfo, Progress, Work
from baton.protocol.commands import Command, Outcome
from baton.protocol.events import KvEvent, LoadSnapshot, Reading
from baton.protocol.ids import RequestId
from baton.protocol.outputs import FinishReason, Logprobs, TopLogprob
from baton.protocol.requests import StopConditions

MODEL_DIR = Path(__file__).parent / "model"
LOAD_INTERVAL_S = 0.25

_FAULT = re.compile(rb"\[\[(fail|stall|die|refuse)(?::(\d+))?\]\]")


class _Ending(NamedTuple):
    """How long one choice is and why it ends: known from the start."""

    length: int
    reason: FinishReason
    stop_reason: int | None = None


def _ending(work: Work, source: tuple[int, ...], first: int, repeats: bool) -> _Ending:
    """Return where a choice that starts at token `first` of `source` ends: at a stop token, its end, or the limit."""
    size, minimum = len(source), work.stop.min_tokens or 0
    limit = work.max_tokens if repeats else min(work.max_tokens, max(size, minimum))
    eos = () if work.stop.ignore_eos else work.eos_token_ids
    stops = _stop_tokens(work.stop)
    if not stops.union(eos).isdisjoint(source):
        for position in range(max(minimum - 1, 0), min(limit, minimum + size)):
            token = source[(position + first) % size]
            if token in eos:
                return _Ending(position + 1, FinishReason.EOS)
            if token in stops:
                return _Ending(position + 1, FinishReason.STOP, token)
    return _Ending(limit, FinishReason.LENGTH if limit == work.max_tokens else FinishReason.EOS)


def _stop_tokens(stop: StopConditions) -> set[int]:
    kinds = (stop.stop_token_ids, stop.stop_token_ids_visible, stop.stop_token_ids_hidden)
    return {token for kind in kinds for token in kind or ()}


class _Sequence:
    """One request inside the engine."""

    __slots__ = (
        "cached_tokens",
        "endings",
        "fault",
        "fault_at",
        "held",
        "logprobs",
        "produced",
        "ready_at",
        "source",
        "step",
        "stream",
        "total",
        "work",
    )

    def __init__(self, work: Work, stream: OutputStream, answer: tuple[int, ...] | None = None) -> None:
        self.work = work
        self.stream = stream
        self.logprobs = work.output.logprobs
        self.source = answer or work.token_ids
        self.step = 0 if answer else 1  # between the first tokens of two choices
        repeats = not answer and (work.stop.max_tokens is not None or bool(work.stop.ignore_eos))
        choices = range(work.sampling.n or 1)
        self.endings = [_ending(work, self.source, index * self.step, repeats) for index in choices]
        self.total = max(ending.length for ending in self.endings)
        self.produced = 0
        self.ready_at = 0.0
        self.held: HeldBlocks | None = None
        self.cached_tokens = 0
        self.fault: str | None = None
        self.fault_at = 0

    def emit(self, count: int) -> bool:
        """Generate the next `count` tokens of every choice; return whether the sequence has ended."""
        source, start = self.source, self.produced
        size, stop = len(source), start + count
        if start == 0:
            self.stream.cached(self.cached_tokens)
        for index, ending in enumerate(self.endings):
            if start >= ending.length:
                continue
            first = index * self.step
            if count == 1:
                tokens = [source[(start + first) % size]]
            else:
                tokens = [source[(at + first) % size] for at in range(start, min(stop, ending.length))]
            logprobs = None if self.logprobs is None else _logprobs(tokens, self.logprobs)
            self.stream.push(tokens, index, logprobs)
            if stop >= ending.length:
                self.stream.finish(ending.reason, index, ending.stop_reason, self.cached_tokens)
        self.produced = stop
        return stop >= self.total


def _logprobs(tokens: list[int], top_tokens: int) -> Logprobs:
    """Return fixed log-probabilities: 0 for the generated token, less for the alternatives."""
    top = tuple(
        tuple(TopLogprob(rank + 1, (token + rank) % 256, -float(rank)) for rank in range(top_tokens))
        for token in tokens
    )
    return Logprobs((0.0,) * len(tokens), top)


class EchoEngine:
    """A GenerateEngine and EncodeEngine (see `ports/engine.py`) that needs no model, no GPU and no network."""

    def __init__(self, options: EchoOptions | None = None, model_dir: Path = MODEL_DIR, name: str = "echo") -> None:
        self._options = options or EchoOptions()
        self._model_dir = model_dir
        self._name = name
        self._script = read_script(Path(self._options.script), model_dir) if self._options.script else None
        self._pace_s = self._options.pace_ms / 1000
        self._pool = BlockPool(self._options.blocks)
        self._kv_ledger = KvLedger(BLOCK)
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[RequestId, _Sequence] = {}
        self._encoded: dict[RequestId, Encoded] = {}
        self._steps = 0
        self._steps_left = 0
        self._work = asyncio.Event()
        self._dead: BatonError | None = None
        self._task: asyncio.Task[None] | None = None
        self._events: asyncio.Queue[Reading | None] = asyncio.Queue()

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        media = self._options.media
        return Capabilities(
            media_encoding=media,
            media_handles=media,
            encoded_modalities=frozenset({"image"} if media else ()),
            modalities=frozenset({"text", "image"} if media else {"text"}),
            max_logprobs=20,
            max_choices=16,
        )

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        config = read_config(self._model_dir)
        self._task = asyncio.create_task(self._run(), name="echo-steps")
        return EngineInfo(
            model_name=self._name,
            model_dir=str(self._model_dir),
            context_length=self._options.context,
            block_size=BLOCK,
            total_blocks=self._options.blocks,
            max_running=self._options.max_running,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            reasoning_end_token=reasoning_end_token(self._model_dir),
        )

    def submit(self, work: Work) -> OutputStream:
        """See `GenerateEngine.submit`."""
        self._alive()
        answer = self._script.answer(work.token_ids) if self._script is not None else None
        sequence = _Sequence(with_image_sizes(work) if work.media else work, OutputStream(work.sampling.n or 1), answer)
        self._refuse_impossible(sequence)
        self._read_fault(sequence)
        self._waiting.append(sequence)
        self._work.set()
        return sequence.stream

    async def abort(self, request_id: RequestId) -> None:
        """See `AbortableEngine.abort`."""
        self._encoded.pop(request_id, None)
        for sequence in self._waiting:
            if sequence.work.request_id == request_id:
                self._waiting.remove(sequence)
                sequence.stream.fail(Cancelled("aborted"))
                return
        running = self._running.get(request_id)
        if running is not None:
            self._remove(running)
            running.stream.fail(Cancelled("aborted"))

    async def encode(self, work: EncodeWork) -> Encoded:
        """See `EncodeEngine.encode`."""
        self._alive()
        if not self._options.media:
            raise Unsupported("the echo engine does not encode media; give it --echo-media")
        if work.request_id in self._encoded:
            raise InvalidRequest(f"request id {work.request_id} is in use")
        sizes = await asyncio.to_thread(image_sizes, work.media)
        self._alive()
        encoded = self._encoded[work.request_id] = Encoded(params={"sizes": sizes})
        self._steps += 1
        return encoded

    async def execute(self, command: Command) -> Outcome:
        """See `Engine.execute`."""
        raise Unsupported(f"the echo engine does not execute {command.__struct_config__.tag}")

    def metrics(self) -> str:
        """See `Engine.metrics`."""
        return ""

    def progress(self) -> Progress:
        """See `Engine.progress`."""
        return Progress(self._steps, len(self._running), len(self._waiting))

    async def readings(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`."""
        last: LoadSnapshot | None = None
        while not (self._dead and self._events.empty()):
            if (load := self._load()) != last:
                yield (last := load)
            try:
                event = await asyncio.wait_for(self._events.get(), LOAD_INTERVAL_S)
            except TimeoutError:
                continue
            if event is not None:
                yield event

    async def stop(self) -> None:
        """See `Engine.stop`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        self._fail_all(EngineDead("the engine has stopped"))

    def _alive(self) -> None:
        if self._dead is not None or self._task is None:
            raise self._dead or EngineDead("the engine is not running")

    def _refuse_impossible(self, sequence: _Sequence) -> None:
        blocks = -(-(len(sequence.work.token_ids) + sequence.total) // BLOCK)
        if blocks > self._pool.total:
            raise InvalidRequest(f"the request needs {blocks} KV blocks; this engine has {self._pool.total}")

    def _read_fault(self, sequence: _Sequence) -> None:
        if self._options.faults:
            text = bytes(token for token in sequence.work.token_ids if token < 256)
            if found := _FAULT.search(text):
                sequence.fault, sequence.fault_at = found[1].decode(), int(found[2] or 0)
        if sequence.fault == "refuse":
            raise InvalidRequest("prompt: refused, as it asked to be")

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        previous = loop.time()
        while True:
            if not self._running and not self._waiting:
                self._work.clear()
                await self._work.wait()
                previous = loop.time()
            due = 1
            if self._pace_s:
                await asyncio.sleep(previous + self._pace_s - loop.time())
                # A late step generates what the missed ones would have, like an engine on a thread of its own.
                due = max(1, int((loop.time() - previous) / self._pace_s))
                previous += due * self._pace_s
            else:
                self._steps_left -= 1
                if self._steps_left <= 0:
                    self._steps_left = self._options.burst
                    await asyncio.sleep(0)
            self._admit(loop.time())
            await self._step(due, loop.time())

    def _admit(self, now: float) -> None:
        while self._waiting and len(self._running) < self._options.max_running:
            sequence = self._waiting[0]
            work = sequence.work
            held = self._pool.allocate(work.token_ids, len(work.token_ids) + sequence.total, work.cache_salt)
            if held is None:
                return
            self._waiting.popleft()
            sequence.held = held
            sequence.cached_tokens = held.cached * BLOCK
            sequence.ready_at = now + self._options.prefill_ms / 1000
            self._running[work.request_id] = sequence
            self._publish_stored(work, held)

    async def _step(self, due: int, now: float) -> None:
        for sequence in tuple(self._running.values()):
            if now < sequence.ready_at:
                continue
            if sequence.fault and sequence.produced >= sequence.fault_at:
                await self._apply_fault(sequence)
            elif sequence.emit(due if sequence.produced else 1):
                self._remove(sequence)
        self._steps += 1

    async def _apply_fault(self, sequence: _Sequence) -> None:
        match sequence.fault:
            case "fail":
                self._remove(sequence)
                sequence.stream.fail(EngineFailed("failed by [[fail]]"))
            case "die":
                self._fail_all(EngineDead("died by [[die]]"))
            case _:
                await asyncio.Event().wait()  # a stall: no step from now on

    def _remove(self, sequence: _Sequence) -> None:
        if self._running.pop(sequence.work.request_id, None) and sequence.held is not None:
            self._pool.release(sequence.held)
            self._publish_evicted()

    def _fail_all(self, error: BatonError) -> None:
        self._dead = self._dead or error
        for sequence in itertools.chain(tuple(self._running.values()), self._waiting):
            self._remove(sequence)
            sequence.stream.fail(self._dead)
        self._waiting.clear()
        self._events.put_nowait(None)

    def _load(self) -> LoadSnapshot:
        return LoadSnapshot(len(self._running), len(self._waiting), self._pool.used, self._pool.total)

    def _publish_stored(self, work: Work, held: HeldBlocks) -> None:
        self._publish_evicted()
        first, stop = held.cached, len(held.hashes)
        parent = event_hash(held.hashes[first - 1]) if first else None
        tokens = work.token_ids[first * BLOCK : stop * BLOCK]
        names = [event_hash(name) for name in held.hashes[first:]]
        self._publish(self._kv_ledger.stored(names, tokens, parent, cache_salt=work.cache_salt))

    def _publish_evicted(self) -> None:
        evicted, self._pool.evicted = self._pool.evicted, []
        if evicted:
            self._publish(self._kv_ledger.removed(map(event_hash, evicted)))

    def _publish(self, events: list[KvEvent]) -> None:
        for event in events:
            self._events.put_nowait(event)
