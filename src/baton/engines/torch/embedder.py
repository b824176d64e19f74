"""The embedding engine: an encoder in a thread of its own, which embeds what waits, across requests, in batches."""

import asyncio
import threading
from array import array
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from baton.config.engines import TorchOptions
from baton.engines.torch.embed_batches import Piece, Ticket, batches, draw
from baton.engines.torch.encoder import Encoder
from baton.errors import BatonError, EngineDead, EngineFailed, InvalidRequest, Unsupported
from baton.models.sentence import SentenceLayout, read_layout
from baton.ports.engine import Capabilities, EmbedWork, EngineInfo, Progress
from baton.protocol.commands import Command, Outcome
from baton.protocol.events import LoadSnapshot, Reading

LOAD_INTERVAL_S = 0.25
STOP_S = 10.0
# Drawn at once, to be sorted by length: enough to sort, little enough that a newcomer does not wait long.
BATCHES_AT_ONCE = 2
BATCH_TOKENS = 1024
MAX_RUNNING = 1024

Vectors = list["array[float]"]


class TorchEmbedder:
    """An Engine (see `ports/engine.py`) for encoders in the sentence-transformers layout."""

    def __init__(self, options: TorchOptions, directory: Path, name: str) -> None:
        self._options = options
        self._batch_tokens = options.batch_tokens or BATCH_TOKENS
        self._directory = directory
        self._name = name
        self._vocabulary = 0
        self._steps = 0
        self._dead: BatonError | None = EngineDead("the engine is not running")
        self._thread: threading.Thread | None = None
        self._stopped = asyncio.Event()
        # The event loop adds and takes back; the thread draws, and removes what is done.
        self._changed = threading.Condition()
        self._tickets: dict[Ticket, asyncio.Future[Vectors]] = {}
        self._closing = False

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        return Capabilities(generate=False, embeddings=True)

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        layout = await asyncio.to_thread(read_layout, self._directory)
        loop = asyncio.get_running_loop()
        started: asyncio.Future[int] = loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(layout, loop, started), name="baton-embedder", daemon=True
        )
        self._thread.start()
        size = await started
        self._vocabulary = layout.vocabulary
        self._dead = None
        return EngineInfo(
            model_name=self._name,
            model_dir=str(self._directory),
            context_length=layout.max_tokens,
            block_size=self._options.block_size,
            total_blocks=0,
            max_running=MAX_RUNNING,
            embedding_size=size,
        )

    async def embed(self, work: EmbedWork) -> Vectors:
        """See `EmbedEngine.embed`."""
        if self._dead is not None:
            raise self._dead
        self._refuse_unknown_tokens(work)
        ticket = Ticket(work.inputs)
        done: asyncio.Future[Vectors] = asyncio.get_running_loop().create_future()
        if not work.inputs:
            return []
        with self._changed:
            self._tickets[ticket] = done
            self._changed.notify()
        try:
            return await done
        finally:
            with self._changed:
                self._tickets.pop(ticket, None)

    async def execute(self, command: Command) -> Outcome:
        """See `Engine.execute`."""
        raise Unsupported("an engine that embeds has nothing to control")

    def metrics(self) -> str:
        """See `Engine.metrics`."""
        return ""

    def progress(self) -> Progress:
        """See `Engine.progress`."""
        with self._changed:
            running = sum(ticket.taken > 0 for ticket in self._tickets)
            return Progress(self._steps, running, len(self._tickets) - running)

    async def readings(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`."""
        last: LoadSnapshot | None = None
        while not self._stopped.is_set():
            progress = self.progress()
            if (load := LoadSnapshot(progress.running, progress.waiting, 0, 0)) != last:
                yield (last := load)
            try:
                await asyncio.wait_for(self._stopped.wait(), LOAD_INTERVAL_S)
            except TimeoutError:
                continue

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._die(EngineDead("the engine has stopped"))
        self._stopped.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.join, STOP_S)

    def _refuse_unknown_tokens(self, work: EmbedWork) -> None:
        for place, tokens in enumerate(work.inputs):
            if not tokens:
                raise InvalidRequest(f"input[{place}]: there is nothing to embed")
            for token in (max(tokens), min(tokens)):
                if not 0 <= token < self._vocabulary:
                    raise InvalidRequest(
                        f"input[{place}]: {token} is not a token of this model; it has {self._vocabulary}"
                    )

    def _die(self, error: BatonError) -> None:
        """Serve nobody any more; from the event-loop thread."""
        self._dead = error
        with self._changed:
            self._closing = True
            self._changed.notify()
            waiting = list(self._tickets.values())
        for done in waiting:
            _settle(done, error)

    # From here on: in the thread.

    def _run(self, layout: SentenceLayout, loop: asyncio.AbstractEventLoop, started: asyncio.Future[int]) -> None:
        try:
            encoder = Encoder(self._options, self._directory, layout)
            _call(loop, _settle, started, encoder.size)
            while pieces := self._draw():
                for batch in batches(pieces, self._batch_tokens):
                    self._embed(encoder, batch, loop)
        except BaseException as error:  # noqa: BLE001 - told to those who wait; the thread has nobody to raise to
            problem = error if isinstance(error, BatonError) else EngineDead(f"the embedder failed: {error!r}")
            _call(loop, _settle, started, problem)
            _call(loop, self._die, problem)

    def _draw(self) -> list[Piece]:
        """Wait for inputs; return some of them, or none when the engine stops."""
        with self._changed:
            while not self._closing:
                if pieces := draw(self._tickets, BATCHES_AT_ONCE * self._batch_tokens):
                    return pieces
                self._changed.wait()
            return []

    def _embed(self, encoder: Encoder, batch: list[Piece], loop: asyncio.AbstractEventLoop) -> None:
        with self._changed:
            wanted = [] if self._closing else [piece for piece in batch if piece.ticket in self._tickets]
        if not wanted:
            return
        try:
            vectors = encoder.embed([piece.tokens for piece in wanted])
        except RuntimeError as error:  # what torch raises
            if not encoder.survives_errors:
                raise
            self._finish({piece.ticket: EngineFailed(f"cannot embed: {error}") for piece in wanted}, loop)
        else:
            ended = [p.ticket for p, vector in zip(wanted, vectors, strict=True) if p.ticket.put(p.place, vector)]
            self._finish({ticket: ticket.vectors for ticket in ended}, loop)
        self._steps += 1

    def _finish(self, ends: dict[Ticket, Vectors | EngineFailed], loop: asyncio.AbstractEventLoop) -> None:
        with self._changed:
            futures = [(self._tickets.pop(ticket, None), end) for ticket, end in ends.items()]
        for done, end in futures:
            if done is not None:
                _call(loop, _settle, done, end)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    """Call `function` in the event loop, if that still turns."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:  # it has closed: nobody waits for the answer
        return


def _settle(done: asyncio.Future[Any], end: object) -> None:
    if done.done():
        return
    if isinstance(end, BaseException):
        done.set_exception(end)
    else:
        done.set_result(end)
