"""The embed port over `encoder.py`: a thread embeds the inputs of all waiting requests in batches."""

import asyncio
from array import array
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import NamedTuple

from baton.config.engines import TorchOptions
from baton.engine_kit.load_readings import load_readings
from baton.engine_kit.threads import fail, resolve
from baton.engines.torch.embed_batches import EmbedInput, PendingRequest, make_batches, take_inputs
from baton.engines.torch.encoder import Encoder
from baton.engines.torch.thread import EngineThread
from baton.errors import BatonError, EngineDead, EngineFailed, Unsupported
from baton.models.sentence import SentenceLayout, read_layout, shorter_sizes
from baton.ports.engine import Capabilities, EmbedWork, EngineInfo, Progress
from baton.protocol.commands import Command, Outcome
from baton.protocol.events import Reading

# Taken at once and sorted by length: enough to sort, few enough that a new request does not wait long.
BATCHES_AT_ONCE = 2
BATCH_TOKENS = 1024
MAX_RUNNING = 1024

Vectors = list["array[float]"]
EndedRequests = list[tuple[PendingRequest, EngineFailed | None]]


class EmbedCore:
    """The encoder and the requests that wait for it: a Stepper (see `thread.py`), one batch a step."""

    def __init__(self, encoder: Encoder, batch_tokens: int) -> None:
        self.encoder = encoder
        self.steps = 0
        self._batch_tokens = batch_tokens
        self._requests: dict[PendingRequest, None] = {}  # in order of arrival
        self._batches: list[list[EmbedInput]] = []
        self._ended: EndedRequests = []

    @property
    def busy(self) -> bool:
        """Whether an input waits: a request leaves with its last vector."""
        return bool(self._requests)

    def add(self, request: PendingRequest) -> None:
        """Queue a request."""
        self._requests[request] = None

    def remove(self, request: PendingRequest) -> None:
        """Forget a request. Idempotent."""
        self._requests.pop(request, None)

    def step(self) -> None:
        """Embed one batch. A failure ends its requests; on a GPU it ends the engine."""
        batch = self._next_batch()
        if not batch:
            return
        self.steps += 1
        try:
            vectors = self.encoder.embed([one.tokens for one in batch])
        except RuntimeError as error:  # what torch raises
            if not self.encoder.survives_errors:
                raise
            self._fail_batch(batch, EngineFailed(f"cannot embed: {error}"))
            return
        for one, vector in zip(batch, vectors, strict=True):
            if one.request.put(one.position, vector):
                self._end(one.request, None)

    def tick(self) -> None:
        """See `Stepper.tick`."""

    def take_result(self) -> EndedRequests | None:
        """See `Stepper.take_result`."""
        ended, self._ended = self._ended, []
        return ended or None

    def close(self) -> None:
        """See `Stepper.close`."""

    def _next_batch(self) -> list[EmbedInput]:
        """Return the next batch; it is empty if its requests have left."""
        if not self._batches:
            inputs = take_inputs(self._requests, BATCHES_AT_ONCE * self._batch_tokens)
            self._batches = make_batches(inputs, self._batch_tokens)
        return [one for one in self._batches.pop(0) if one.request in self._requests]

    def _fail_batch(self, batch: list[EmbedInput], failure: EngineFailed) -> None:
        for request in {one.request for one in batch}:
            self._end(request, failure)

    def _end(self, request: PendingRequest, failure: EngineFailed | None) -> None:
        del self._requests[request]
        self._ended.append((request, failure))


class _Running(NamedTuple):
    """What exists between the end of `start` and `stop`."""

    thread: EngineThread[EmbedCore, EndedRequests]
    core: EmbedCore


class TorchEmbedder:
    """An EmbedEngine (see `ports/engine.py`) for encoders in the sentence-transformers layout."""

    def __init__(self, options: TorchOptions, directory: Path, name: str) -> None:
        self._options = options
        self._directory = directory
        self._name = name
        self._thread: EngineThread[EmbedCore, EndedRequests] | None = None
        self._running: _Running | None = None
        self._dead: BatonError | None = None
        self._stopped = asyncio.Event()
        self._pending: dict[PendingRequest, asyncio.Future[Vectors]] = {}

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        return Capabilities(generate=False, embeddings=True)

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        layout = await asyncio.to_thread(read_layout, self._directory)
        thread: EngineThread[EmbedCore, EndedRequests] = EngineThread(self._deliver, self._on_end)
        self._thread = thread
        core = await thread.start("torch-embedder", lambda: self._load_core(layout))
        self._running = _Running(thread, core)
        return EngineInfo(
            model_name=self._name,
            model_dir=str(self._directory),
            context_length=layout.max_tokens,
            block_size=self._options.block_size,
            total_blocks=0,
            max_running=MAX_RUNNING,
            vocab_size=layout.vocabulary,
            embedding_size=core.encoder.size,
            embedding_dimensions=shorter_sizes(layout.matryoshka_dimensions, layout.is_matryoshka, core.encoder.size),
        )

    async def embed(self, work: EmbedWork) -> Vectors:
        """See `EmbedEngine.embed`."""
        if self._dead is not None or self._running is None:
            raise self._dead or EngineDead("the engine is not running")
        if not work.inputs:
            return []
        thread, request = self._running.thread, PendingRequest(work.inputs)
        done: asyncio.Future[Vectors] = asyncio.get_running_loop().create_future()
        self._pending[request] = done
        thread.submit(lambda core: core.add(request))
        try:
            return await done
        finally:
            if self._pending.pop(request, None) is not None:
                thread.submit(lambda core: core.remove(request))

    async def execute(self, command: Command) -> Outcome:
        """See `Engine.execute`."""
        raise Unsupported(f"the embedder does not execute {command.__struct_config__.tag}")

    def metrics(self) -> str:
        """See `Engine.metrics`."""
        return ""

    def progress(self) -> Progress:
        """See `Engine.progress`."""
        steps = 0 if self._running is None else self._running.core.steps
        running = sum(request.taken > 0 for request in self._pending)
        return Progress(steps, running, len(self._pending) - running)

    def readings(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`."""
        return load_readings(self.progress, self._stopped)

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._fail_all(EngineDead("the engine has stopped"))
        self._stopped.set()
        if self._thread is not None:
            await self._thread.stop()
        self._running = None

    def _load_core(self, layout: SentenceLayout) -> EmbedCore:
        """Runs on the thread: loading takes seconds. Raises ConfigError or EngineDead."""
        try:
            encoder = Encoder(self._options, self._directory, layout)
        except BatonError:
            raise
        except Exception as error:
            raise EngineDead(f"the embedder failed: {error!r}") from error
        return EmbedCore(encoder, self._options.batch_tokens or BATCH_TOKENS)

    def _deliver(self, ended: EndedRequests) -> None:
        for request, failure in ended:
            done = self._pending.pop(request, None)
            if done is not None:
                if failure is None:
                    resolve(done, request.vectors)
                else:
                    fail(done, failure)

    def _on_end(self, problem: BaseException | None) -> None:
        if problem is not None:
            self._fail_all(EngineDead(f"the embedder failed: {problem!r}"))

    def _fail_all(self, error: BatonError) -> None:
        """Fail every request; none is accepted after this. The first error stays."""
        self._dead = self._dead or error
        pending, self._pending = self._pending, {}
        for done in pending.values():
            fail(done, self._dead)
