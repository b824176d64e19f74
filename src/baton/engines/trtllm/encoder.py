"""The Engine port over TensorRT-LLM's MultimodalEncoder: images in, handles of what they became out.

The library cuts an image into pieces in the thread that asks, so every request has one. What it made is held as long as
the library's result is; a result that nobody was told of is opened and closed once, for its owner frees a tensor that
is shared only after somebody has read it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path

from baton.config.engines import TrtllmOptions
from baton.engine_kit.threads import run_in_thread
from baton.engines.trtllm import lifecycle, media_handles
from baton.engines.trtllm.cli_args import Tree, read_arguments
from baton.engines.trtllm.compat import Library, load
from baton.engines.trtllm.launch import make_encoder
from baton.engines.trtllm.library_types import Encoder, EncodeResult, Handle
from baton.engines.trtllm.llm_args import build_encoder_arguments, number, plan_encoder_arguments
from baton.errors import BatonError, Cancelled, EngineDead, InvalidRequest, Unsupported
from baton.media.images import decode_image
from baton.models.directory import read_config
from baton.models.tokenizer import HubTokenizer
from baton.ports.engine import Capabilities, Encoded, EncodeWork, EngineInfo, Progress
from baton.protocol.commands import Command, Outcome
from baton.protocol.events import LoadSnapshot, Reading
from baton.protocol.ids import RequestId

log = logging.getLogger(__name__)

ABORT_S = 5.0
LOAD_S = 0.25


class _Encoding:
    """One request, from the call until nobody needs what was made. Nothing else holds the library's result."""

    def __init__(self, work: EncodeWork) -> None:
        self.work = work
        self.given_up = False
        self.result: EncodeResult | None = None
        self.thread: asyncio.Task[dict[str, object]] | None = None

    def begun(self, result: EncodeResult) -> None:
        """On the thread: the library has it. Whoever gave up before could not tell the library."""
        self.result = result
        if self.given_up:
            _abort(result)

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        self.given_up = True
        if self.result is not None and self.thread is not None and not self.thread.done():
            _abort(self.result)

    def let_go(self) -> list[Handle]:
        """Hold the result no longer; return the handles of what it held."""
        result, self.result = self.result, None
        params = None if result is None else result.disaggregated_params
        return [] if params is None else params.multimodal_embedding_handles or []


class TrtllmEncoder:
    """An Engine (see `ports/engine.py`) that encodes the images of prompts for the model in `model_dir`."""

    def __init__(
        self,
        options: TrtllmOptions,
        args: tuple[str, ...],
        model_dir: Path,
        name: str,
        library: Library | None = None,
    ) -> None:
        self._tree: Tree = plan_encoder_arguments(options, read_arguments(args), model_dir)
        self._slots = number(self._tree, "max_batch_size", 0)
        self._model_dir = model_dir
        self._name = name
        self._library = library
        self._encoder: Encoder | None = None
        self._tokenizer: HubTokenizer | None = None
        self._free = asyncio.Semaphore(self._slots)
        self._open: dict[RequestId, _Encoding] = {}
        self._held: dict[RequestId, _Encoding] = {}
        self._aside: set[asyncio.Task[None]] = set()
        self._steps = 0
        self._dead: BatonError | None = None
        self._death = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._stopping = asyncio.Lock()

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        return Capabilities(generate=False, media_encoding=True, modalities=frozenset({"image"}))

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        config = read_config(self._model_dir)
        self._tokenizer = await run_in_thread("trtllm-tokenizer", lambda: HubTokenizer(self._model_dir))
        library = self._library if self._library is not None else await run_in_thread("trtllm-import", load)
        self._library = library
        encoder = await run_in_thread("trtllm-start", lambda: self._make(library))
        self._watching = asyncio.create_task(lifecycle.watch(encoder, library, self._die), name="trtllm-health")
        return EngineInfo(
            model_name=self._name,
            model_dir=str(self._model_dir),
            context_length=config.max_position_embeddings or 1,
            block_size=1,
            total_blocks=1,
            max_running=self._slots,
            eos_token_ids=config.eos_token_ids,
        )

    async def abort(self, request_id: RequestId) -> None:
        """See `AbortableEngine.abort`. What the library is slow to let go of ends by itself after `ABORT_S`."""
        if (held := self._held.pop(request_id, None)) is not None:
            held.let_go()
        encoding = self._open.get(request_id)
        if encoding is not None:
            encoding.give_up()
            if encoding.thread is not None:
                await asyncio.wait([encoding.thread], timeout=ABORT_S)

    async def encode(self, work: EncodeWork) -> Encoded:
        """See `EncodeEngine.encode`."""
        self._alive()
        if work.request_id in self._open or work.request_id in self._held:
            raise InvalidRequest(f"request id {work.request_id} is in use")
        encoding = self._open[work.request_id] = _Encoding(work)
        try:
            params = await self._encode(encoding)
        except BaseException:
            self._take_back(encoding)
            raise
        finally:
            del self._open[work.request_id]
        self._held[work.request_id] = encoding
        return Encoded(params=params)

    async def execute(self, command: Command) -> Outcome:
        """See `Engine.execute`."""
        self._alive()
        raise Unsupported("an encoder cannot be ordered to do that")

    async def readings(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`."""
        last: LoadSnapshot | None = None
        while self._dead is None:
            now = self.progress()
            load = LoadSnapshot(running=now.running, waiting=now.waiting, used_blocks=0, total_blocks=1)
            if load != last:
                yield (last := load)
            try:
                await asyncio.wait_for(self._death.wait(), LOAD_S)
            except TimeoutError:
                continue

    def metrics(self) -> str:
        """See `Engine.metrics`: the library counts nothing of an encoder."""
        return ""

    def progress(self) -> Progress:
        """See `Engine.progress`."""
        running = sum(encoding.thread is not None for encoding in self._open.values())
        return Progress(self._steps, running, len(self._open) - running)

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._die(EngineDead("the engine has stopped"))
        async with self._stopping:
            if self._watching is not None:
                self._watching.cancel()
                await asyncio.wait([self._watching])
                self._watching = None
            encoder, self._encoder = self._encoder, None
            if encoder is not None:
                await lifecycle.shut_down(encoder)

    def _make(self, library: Library) -> Encoder:
        """On a thread: whoever waits for it may have gone when it is done."""
        encoder = make_encoder(library, build_encoder_arguments(library, self._tree))
        self._encoder = encoder
        if self._dead is not None:
            encoder.shutdown()
            raise self._dead
        return encoder

    async def _encode(self, encoding: _Encoding) -> dict[str, object]:
        await self._free.acquire()
        if encoding.given_up or self._dead is not None:
            self._free.release()
            raise self._dead or Cancelled("aborted")
        thread = encoding.thread = asyncio.create_task(run_in_thread("trtllm-encode", lambda: self._compute(encoding)))
        thread.add_done_callback(self._thread_ended)
        dying = asyncio.create_task(self._death.wait())
        try:
            await asyncio.wait([thread, dying], return_when=asyncio.FIRST_COMPLETED)
        finally:
            dying.cancel()
        if encoding.given_up:
            raise Cancelled("aborted")
        self._alive()
        return await thread

    def _thread_ended(self, thread: asyncio.Task[dict[str, object]]) -> None:
        """Others may begin; whether anybody waits for this one does not matter."""
        self._steps += 1
        self._free.release()
        if not thread.cancelled() and isinstance(error := thread.exception(), EngineDead):
            self._die(error)

    def _compute(self, encoding: _Encoding) -> dict[str, object]:
        """On a thread of its own. Raises what is wrong with the request, or the engine."""
        encoder, library, tokenizer, work = self._encoder, self._library, self._tokenizer, encoding.work
        assert library is not None
        assert tokenizer is not None
        if encoder is None:
            raise EngineDead("the engine has stopped")
        try:
            result = _ask(encoder, library, work)
            encoding.begun(result)
            result.result()
        except BatonError:
            raise
        except Exception as error:
            raise lifecycle.meaning(error, encoder, library) from error
        if encoding.given_up:
            return {}
        return media_handles.written(result.disaggregated_params, tokenizer.decode(work.token_ids))

    def _take_back(self, encoding: _Encoding) -> None:
        """Nobody has been told of what was made, or will be: see that it does not stay."""
        encoding.give_up()
        if encoding.thread is not None:
            encoding.thread.add_done_callback(lambda _: self._discard(encoding))

    def _discard(self, encoding: _Encoding) -> None:
        """Its thread has ended."""
        if encoding.result is None:
            return
        task = asyncio.create_task(run_in_thread("trtllm-discard", lambda: self._open_and_close(encoding)))
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)

    def _open_and_close(self, encoding: _Encoding) -> None:
        assert self._library is not None
        result = encoding.result  # holds the tensors until they have been read
        for handle in encoding.let_go():
            try:
                self._library.shared_tensors().from_dict(handle).get_local_view()
            except Exception as error:  # noqa: BLE001 - then it stays until the encoder ends
                log.warning("what nobody wants cannot be freed: %r", error)
        del result

    def _alive(self) -> None:
        if self._dead is not None or self._encoder is None:
            raise self._dead or EngineDead("the engine is not running")

    def _die(self, error: BatonError) -> None:
        """The first reason stays."""
        self._dead = self._dead or error
        held, self._held = self._held, {}
        for encoding in held.values():
            encoding.let_go()
        self._death.set()


def _ask(encoder: Encoder, library: Library, work: EncodeWork) -> EncodeResult:
    """Hand `work` to the library, which looks at images and prompt at once. Raises InvalidRequest, or the library's."""
    images = [decode_image(file) for file in work.media]
    try:
        return encoder.generate_async(
            inputs={
                "prompt_token_ids": list(work.token_ids),
                "multi_modal_data": {"image": images},
                "mm_processor_kwargs": {},
            }
        )
    except (library.request_error, ValueError, TypeError) as error:
        raise InvalidRequest(f"multi_modal_data: TensorRT-LLM cannot encode it: {error}") from error


def _abort(result: EncodeResult) -> None:
    try:
        result.abort()
    except Exception as error:  # noqa: BLE001 - an engine that is gone has nothing to end
        log.debug("an encoding cannot be aborted: %r", error)
