"""The echo engine: repeats the prompt, one token a step, and behaves like a real engine otherwise.

With `max_tokens` it repeats the prompt until that many tokens are generated; without, it generates the prompt once.
Choice i starts i tokens later. A script replaces the echo of some prompts by an answer. Blocks are reserved for the
whole output at admission: nothing is preempted.

With `keeps_kv` it has a KV cache (`kv.py`) that other workers read and write. A producing request stays in `_offered`
until it is aborted; a consuming one takes part in no step until its KV is there.
"""

import asyncio
import itertools
import re
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path

from baton.config.engines import EchoOptions
from baton.engine_kit.block_hash import event_hash
from baton.engine_kit.kv_ledger import KvLedger
from baton.engine_kit.output_stream import OutputStream
from baton.engines.echo.blocks import BLOCK, BlockPool, HeldBlocks
from baton.engines.echo.images import MEDIA, encode_image
from baton.engines.echo.kv import EchoKv
from baton.engines.echo.script import read_script
from baton.engines.echo.sequence import Sequence
from baton.errors import BatonError, Cancelled, EngineDead, EngineFailed, InvalidRequest, Unsupported
from baton.models.directory import read_config
from baton.models.reasoning import reasoning_end_token
from baton.ports.engine import Capabilities, Encoded, EncodeWork, EngineInfo, HandoffStyle, Progress, Work
from baton.protocol.commands import Command, Outcome
from baton.protocol.events import KvEvent, LoadSnapshot, Reading
from baton.protocol.ids import RequestId
from baton.protocol.outputs import KvComputed, KvWanted

MODEL_DIR = Path(__file__).parent / "model"
VISION_MODEL_DIR = Path(__file__).parent / "vision_model"  # has placeholders of images
OFFERED_BLOCKS = 32  # in a step
LOAD_INTERVAL_S = 0.25

_FAULT = re.compile(rb"\[\[(fail|stall|die|refuse)(?::(\d+))?\]\]")


class EchoEngine:
    """A KvImportEngine and EncodeEngine (see `ports/engine.py`) that needs no model, no GPU and no network."""

    def __init__(
        self,
        options: EchoOptions | None = None,
        model_dir: Path | None = None,
        name: str = "echo",
        keeps_kv: bool = False,
    ) -> None:
        self._options = options or EchoOptions()
        self._model_dir = model_dir or (VISION_MODEL_DIR if self._options.media else MODEL_DIR)
        self._name = name
        self._script = read_script(Path(self._options.script), self._model_dir) if self._options.script else None
        self._pace_s = self._options.pace_ms / 1000
        self._pool = BlockPool(self._options.blocks)
        self._kv_ledger = KvLedger(BLOCK)
        self._waiting: deque[Sequence] = deque()
        self._running: dict[RequestId, Sequence] = {}
        self._offered: dict[RequestId, Sequence] = {}
        self._kv = EchoKv(self._options.blocks, f"echo-{name}") if keeps_kv else None
        self._receiving = 0  # of those that run
        self._blocked = False  # the first that waits needs blocks that other workers use
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
            media_embeddings=media,
            encoded_modalities=frozenset({"image"} if media else ()),
            handoff=HandoffStyle.NONE if self._kv is None else HandoffStyle.EARLY,
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
            kv=self._kv.memory if self._kv is not None else None,
            media=MEDIA if self._options.media else None,
        )

    def submit(self, work: Work) -> OutputStream:
        """See `GenerateEngine.submit`."""
        self._alive()
        answer = self._script.answer(work.token_ids) if self._script is not None else None
        sequence = Sequence(work, OutputStream(work.sampling.n or 1), answer)
        self._refuse_impossible(sequence)
        self._read_fault(sequence)
        self._waiting.append(sequence)
        sequence.report("queued")
        self._work.set()
        return sequence.stream

    async def abort(self, request_id: RequestId) -> None:
        """See `AbortableEngine.abort`."""
        offered = self._offered.pop(request_id, None)
        if offered is not None:
            self._release(offered)
        for sequence in self._waiting:
            if sequence.work.request_id == request_id:
                self._waiting.remove(sequence)
                sequence.stream.fail(Cancelled("aborted"))
                return
        running = self._running.get(request_id)
        if running is not None:
            self._remove(running)
            self._offered.pop(request_id, None)
            self._release(running)
            running.stream.fail(Cancelled("aborted"))

    async def encode(self, work: EncodeWork) -> Encoded:
        """See `EncodeEngine.encode`."""
        self._alive()
        if not self._options.media:
            raise Unsupported("the echo engine does not encode media; give it --echo-media")
        await asyncio.sleep(self._options.encode_ms / 1000)
        rows = await asyncio.to_thread(lambda: tuple(map(encode_image, work.media)))
        self._alive()
        self._steps += 1
        return Encoded(items=rows)

    def received(self, request_id: RequestId) -> None:
        """See `KvImportEngine.received`."""
        sequence = self._running.get(request_id)
        if sequence is None or not sequence.receiving or sequence.held is None or self._kv is None:
            return
        self._receiving -= 1
        sequence.received(self._kv.read(len(sequence.numbers), sequence.held.numbers))
        self._pool.arrived(sequence.held)
        self._publish_stored(sequence, sequence.held)
        self._work.set()

    async def execute(self, command: Command) -> Outcome:
        """See `Engine.execute`."""
        raise Unsupported(f"the echo engine does not execute {command.__struct_config__.tag}")

    def metrics(self) -> str:
        """See `Engine.metrics`."""
        return ""

    def progress(self) -> Progress:
        """See `Engine.progress`."""
        return Progress(self._steps, self._steppable, len(self._waiting))

    async def readings(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`."""
        last: LoadSnapshot | None = None
        while not (self._dead and self._events.empty()):
            if (load := self._load()) != last:
                yield (last := load)
            try:
                async with asyncio.timeout(LOAD_INTERVAL_S):
                    event = await self._events.get()
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
        if self._kv is not None:
            self._kv.close()

    def _alive(self) -> None:
        if self._dead is not None or self._task is None:
            raise self._dead or EngineDead("the engine is not running")

    def _refuse_impossible(self, sequence: Sequence) -> None:
        work = sequence.work
        if sequence.produces and ((work.sampling.n or 1) > 1 or work.max_tokens != 1):
            raise InvalidRequest("work that produces KV has one choice and one token")
        if work.request_id in self._offered:
            raise InvalidRequest(f"request id {work.request_id} is in use")
        blocks = -(-(len(work.token_ids) + sequence.reserved) // BLOCK)
        if blocks > self._pool.total:
            raise InvalidRequest(f"the request needs {blocks} KV blocks; this engine has {self._pool.total}")

    def _read_fault(self, sequence: Sequence) -> None:
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
            if not self._can_step():
                await self._wait_for_work()
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

    def _can_step(self) -> bool:
        """Whether there is something to do: not while all work waits for other workers to read or write KV."""
        return self._steppable > 0 or (bool(self._waiting) and not self._blocked)

    async def _wait_for_work(self) -> None:
        self._work.clear()
        try:
            # An engine with work shows signs of life.
            async with asyncio.timeout(LOAD_INTERVAL_S if self._waiting else None):
                await self._work.wait()
        except TimeoutError:
            self._steps += 1
        self._blocked = False

    @property
    def _steppable(self) -> int:
        return len(self._running) - self._receiving

    def _admit(self, now: float) -> None:
        while self._waiting and self._steppable < self._options.max_running:
            sequence = self._waiting[0]
            work = sequence.work
            size = len(work.token_ids) + sequence.reserved
            held = self._pool.allocate(sequence.hashed, size, work.cache_salt, sequence.consumes)
            if held is None:
                self._blocked = not self._steppable
                return
            self._waiting.popleft()
            sequence.held = held
            sequence.cached_tokens = held.cached * BLOCK
            sequence.ready_at = now + self._options.prefill_ms / 1000
            self._running[work.request_id] = sequence
            sequence.report("first_step")
            if sequence.produces:
                self._offered[work.request_id] = sequence
            self._compute(sequence, held)

    def _compute(self, sequence: Sequence, held: HeldBlocks) -> None:
        """Compute the KV of a prompt, or ask for it: all but a last token that is missing alone."""
        if self._kv is not None and sequence.consumes and sequence.cached_tokens < len(sequence.numbers) - 1:
            sequence.receiving = True
            self._receiving += 1
            blocks = held.numbers[held.cached : -(-len(sequence.numbers) // BLOCK)]
            sequence.stream.want(KvWanted(held.cached, tuple(blocks)))
            return
        if self._kv is not None:
            self._kv.write(sequence.numbers, held.numbers, held.cached)
            if sequence.consumes:
                sequence.received(self._kv.read(len(sequence.numbers), held.numbers))
                self._pool.arrived(held)
        self._publish_stored(sequence, held)

    async def _step(self, due: int, now: float) -> None:
        for sequence in self._ready(now):
            if sequence.fault and sequence.produced >= sequence.fault_at:
                await self._apply_fault(sequence)
            elif sequence.produces and self._offer(sequence):
                await asyncio.sleep(0)  # what is offered can be fetched while the rest is computed
            elif sequence.emit(due if sequence.produced else 1):
                self._remove(sequence)
        self._steps += 1

    def _ready(self, now: float) -> list[Sequence]:
        """Return what can generate: its KV is there, and its prefill is done."""
        return [each for each in self._running.values() if not each.receiving and now >= each.ready_at]

    def _offer(self, sequence: Sequence) -> bool:
        """Offer some more blocks of a prompt; return whether there were any."""
        total = -(-len(sequence.numbers) // BLOCK)
        if self._kv is None or sequence.held is None or sequence.offered >= total:
            return False
        blocks = tuple(sequence.held.numbers[sequence.offered : min(total, sequence.offered + OFFERED_BLOCKS)])
        sequence.offered += len(blocks)
        sequence.report("prefill_chunk", len(blocks) * BLOCK)
        sequence.stream.computed(KvComputed(blocks, sequence.offered >= total, sequence.cached_tokens))
        return True

    async def _apply_fault(self, sequence: Sequence) -> None:
        match sequence.fault:
            case "fail":
                self._remove(sequence)
                sequence.stream.fail(EngineFailed("failed by [[fail]]"))
            case "die":
                self._fail_all(EngineDead("died by [[die]]"))
            case _:
                await asyncio.Event().wait()  # a stall: no step from now on

    def _remove(self, sequence: Sequence) -> None:
        """The sequence takes part in no further step. Produced KV stays until it is aborted."""
        if self._running.pop(sequence.work.request_id, None) is None:
            return
        if sequence.receiving:
            self._receiving -= 1
            sequence.receiving = False
        if not sequence.produces:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence. Idempotent."""
        held, sequence.held = sequence.held, None
        if held is not None:
            self._pool.release(held)
            self._publish_evicted()
            self._work.set()

    def _fail_all(self, error: BatonError) -> None:
        self._dead = self._dead or error
        for sequence in itertools.chain(tuple(self._running.values()), self._waiting):
            self._remove(sequence)
            self._release(sequence)
            sequence.stream.fail(self._dead)
        self._waiting.clear()
        self._events.put_nowait(None)

    def _load(self) -> LoadSnapshot:
        return LoadSnapshot(self._steppable, len(self._waiting), self._pool.used, self._pool.total)

    def _publish_stored(self, sequence: Sequence, held: HeldBlocks) -> None:
        self._publish_evicted()
        first, stop = held.cached, held.named
        parent = event_hash(held.hashes[first - 1]) if first else None
        tokens = sequence.hashed[first * BLOCK : stop * BLOCK]
        names = [event_hash(name) for name in held.hashes[first:stop]]
        self._publish(self._kv_ledger.stored(names, tokens, parent, cache_salt=sequence.work.cache_salt))

    def _publish_evicted(self) -> None:
        evicted, self._pool.evicted = self._pool.evicted, []
        if evicted:
            self._publish(self._kv_ledger.removed(map(event_hash, evicted)))

    def _publish(self, events: list[KvEvent]) -> None:
        for event in events:
            self._events.put_nowait(event)
