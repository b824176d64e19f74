"""The encode port over TensorRT-LLM's MultimodalEncoder: images in, handles of their embeddings out.

The library preprocesses images in the calling thread, so every request has one. Embeddings are held as long as the
library's result object is. The owner of a shared tensor frees it only after it has been read once, so a result that is
not returned to the caller is opened and closed here.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from baton.config.engines import TrtllmOptions
from baton.engine_kit.threads import run_in_thread
from baton.engines.trtllm import lifecycle, media_handles
from baton.engines.trtllm.cli_args import Tree, read_arguments
from baton.engines.trtllm.compat import Library
from baton.engines.trtllm.launch import make_encoder
from baton.engines.trtllm.library_types import Encoder, EncodeResult, Handle
from baton.engines.trtllm.lifecycle import Lifecycle, Timeouts, load_library
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

LOAD_INTERVAL_S = 0.25


class _Encoding:
    """One request, from the call until its embeddings are released. The only owner of the library's result."""

    def __init__(self, work: EncodeWork) -> None:
        self.work = work
        self.aborted = False
        self.result: EncodeResult | None = None
        self.thread: asyncio.Task[dict[str, object]] | None = None

    def submitted(self, result: EncodeResult) -> None:
        """On the thread: the library has the request. An abort before this could not reach the library."""
        self.result = result
        if self.aborted:
            _send_abort(self.work.request_id, result)

    def abort(self) -> None:
        """End it as soon as the library can."""
        self.aborted = True
        if self.result is not None and self.thread is not None and not self.thread.done():
            _send_abort(self.work.request_id, self.result)

    def release(self) -> list[Handle]:
        """Hold the result no longer; return the handles of its embeddings."""
        result, self.result = self.result, None
        params = None if result is None else result.disaggregated_params
        return [] if params is None else params.multimodal_embedding_handles or []


class _Running(msgspec.Struct, frozen=True, kw_only=True):
    """What exists once the encoder has started."""

    library: Library
    encoder: Encoder
    tokenizer: HubTokenizer

    def compute(self, encoding: _Encoding) -> dict[str, object]:
        """On a thread: encode, and return the handles. Raises the error of the request or of the encoder."""
        work = encoding.work
        try:
            result = _submit(self.encoder, self.library, work)
            encoding.submitted(result)
            result.result()
        except BatonError:
            raise
        except Exception as error:
            raise lifecycle.translate(error, self.encoder, self.library) from error
        if encoding.aborted:
            return {}
        return media_handles.to_wire(result.disaggregated_params, self.tokenizer.decode(work.token_ids))

    def discard(self, encoding: _Encoding) -> None:
        """On a thread: read each tensor once, so that its owner frees it."""
        result = encoding.result  # holds the tensors until they have been read
        for handle in encoding.release():
            try:
                self.library.shared_tensors().from_dict(handle).get_local_view()
            except Exception as error:  # noqa: BLE001 - then the tensor stays until the encoder ends
                log.warning("%s embeddings cannot be freed: %r", encoding.work.request_id, error)
        del result


class TrtllmEncoder:
    """An `EncodeEngine` (see `ports/engine.py`) for the images of prompts, with the model in `model_dir`."""

    def __init__(
        self,
        options: TrtllmOptions,
        args: tuple[str, ...],
        model_dir: Path,
        name: str,
        library: Library | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
    ) -> None:
        self._tree: Tree = plan_encoder_arguments(options, read_arguments(args), model_dir)
        self._max_running = number(self._tree, "max_batch_size", 0)
        self._model_dir = model_dir
        self._name = name
        self._given_library = library
        self._timeouts = timeouts
        self._lifecycle: Lifecycle[Encoder] = Lifecycle(timeouts, self._end)
        self._running: _Running | None = None
        self._slots = asyncio.Semaphore(self._max_running)
        self._encodings: dict[RequestId, _Encoding] = {}
        self._held: dict[RequestId, _Encoding] = {}
        self._discards: set[asyncio.Task[None]] = set()
        self._steps = 0
        self._ended = asyncio.Event()

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        return Capabilities(generate=False, media_encoding=True, encoded_modalities=frozenset({"image"}))

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        config = read_config(self._model_dir)
        tokenizer = await run_in_thread("trtllm-tokenizer", lambda: HubTokenizer(self._model_dir))
        library = await load_library(self._given_library)
        encoder = await self._lifecycle.build(
            lambda: make_encoder(library, build_encoder_arguments(library, self._tree))
        )
        self._lifecycle.start_health_checks(encoder, library)
        self._running = _Running(library=library, encoder=encoder, tokenizer=tokenizer)
        return EngineInfo(
            model_name=self._name,
            model_dir=str(self._model_dir),
            context_length=config.max_position_embeddings or 1,
            block_size=1,
            total_blocks=1,
            max_running=self._max_running,
            eos_token_ids=config.eos_token_ids,
        )

    async def abort(self, request_id: RequestId) -> None:
        """See `AbortableEngine.abort`. Waits for the library up to `Timeouts.abort_s`."""
        if (held := self._held.pop(request_id, None)) is not None:
            held.release()
        encoding = self._encodings.get(request_id)
        if encoding is not None:
            encoding.abort()
            if encoding.thread is not None:
                await asyncio.wait([encoding.thread], timeout=self._timeouts.abort_s)

    async def encode(self, work: EncodeWork) -> Encoded:
        """See `EncodeEngine.encode`."""
        running = self._alive()
        if work.request_id in self._encodings or work.request_id in self._held:
            raise InvalidRequest(f"request id {work.request_id} is in use")
        encoding = self._encodings[work.request_id] = _Encoding(work)
        try:
            params = await self._encode(encoding, running)
        except BaseException:
            self._withdraw(encoding, running)
            raise
        finally:
            del self._encodings[work.request_id]
        self._held[work.request_id] = encoding
        return Encoded(params=params)

    async def execute(self, command: Command) -> Outcome:
        """See `Engine.execute`."""
        raise Unsupported("an encoder has no commands")

    async def readings(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`."""
        published: LoadSnapshot | None = None
        while self._lifecycle.error is None:
            now = self.progress()
            load = LoadSnapshot(running=now.running, waiting=now.waiting, used_blocks=0, total_blocks=1)
            if load != published:
                yield (published := load)
            try:
                await asyncio.wait_for(self._ended.wait(), LOAD_INTERVAL_S)
            except TimeoutError:
                continue

    def metrics(self) -> str:
        """See `Engine.metrics`. The library has none of an encoder."""
        return ""

    def progress(self) -> Progress:
        """See `Engine.progress`."""
        running = sum(encoding.thread is not None for encoding in self._encodings.values())
        return Progress(self._steps, running, len(self._encodings) - running)

    async def stop(self) -> None:
        """See `Engine.stop`."""
        await self._lifecycle.stop()

    async def _encode(self, encoding: _Encoding, running: _Running) -> dict[str, object]:
        await self._slots.acquire()
        if encoding.aborted or self._lifecycle.error is not None:
            self._slots.release()
            raise self._lifecycle.error or Cancelled("aborted")
        thread = asyncio.create_task(run_in_thread("trtllm-encode", lambda: running.compute(encoding)))
        encoding.thread = thread
        thread.add_done_callback(self._thread_ended)
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait([thread, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if encoding.aborted:
            raise Cancelled("aborted")
        self._alive()
        return await thread

    def _thread_ended(self, thread: asyncio.Task[dict[str, object]]) -> None:
        """Free the slot, also when the caller no longer waits."""
        self._steps += 1
        self._slots.release()
        if not thread.cancelled() and isinstance(error := thread.exception(), EngineDead):
            self._lifecycle.end(error)

    def _withdraw(self, encoding: _Encoding, running: _Running) -> None:
        """The caller does not get the embeddings: free them when the thread has ended."""
        encoding.abort()
        if encoding.thread is not None:
            encoding.thread.add_done_callback(lambda _: self._discard(encoding, running))

    def _discard(self, encoding: _Encoding, running: _Running) -> None:
        if encoding.result is None:
            return
        task = asyncio.create_task(run_in_thread("trtllm-discard", lambda: running.discard(encoding)))
        self._discards.add(task)
        task.add_done_callback(self._discards.discard)

    def _alive(self) -> _Running:
        if self._lifecycle.error is not None or self._running is None:
            raise self._lifecycle.error or EngineDead("the engine is not running")
        return self._running

    def _end(self, error: BatonError) -> None:
        """The encoder has died or stopped: end every call with the error of the lifecycle."""
        held, self._held = self._held, {}
        for encoding in held.values():
            encoding.release()
        self._ended.set()


def _submit(encoder: Encoder, library: Library, work: EncodeWork) -> EncodeResult:
    """Submit `work` to the library, which checks images and prompt at once. Raises InvalidRequest, or its error."""
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


def _send_abort(request_id: RequestId, result: EncodeResult) -> None:
    try:
        result.abort()
    except Exception as error:  # noqa: BLE001 - an encoder that has ended has nothing to abort
        log.debug("%s cannot be aborted: %r", request_id, error)
