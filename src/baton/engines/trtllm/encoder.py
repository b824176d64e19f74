"""The encode port over TensorRT-LLM's MultimodalEncoder: images in, handles of their embeddings out.

The library preprocesses images in the calling thread, so every request has one. Its calls that send something to the
encoder use one socket, which belongs to one thread at a time. Embeddings are held as long as the library's result
object is. The owner of a shared tensor frees it only after it has been read once, so a result that is not returned to
the caller is opened and closed here.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import cast

import msgspec

from baton.config.engines import TrtllmOptions
from baton.engine_kit.load_readings import load_readings
from baton.engine_kit.threads import run_in_thread
from baton.engines.trtllm import lifecycle, media_handles
from baton.engines.trtllm.cli_args import Tree, read_arguments
from baton.engines.trtllm.compat import Library
from baton.engines.trtllm.generate_args import discard
from baton.engines.trtllm.launch import make_encoder
from baton.engines.trtllm.library_types import (
    Encoder,
    Encoder13,
    EncodeResult,
    Handle,
    PreprocessedInputs13,
    PromptFields,
)
from baton.engines.trtllm.lifecycle import Lifecycle, Timeouts, load_library
from baton.engines.trtllm.llm_args import build_encoder_arguments, number, plan_encoder_arguments
from baton.engines.trtllm.media_prompt import MediaPrompts
from baton.errors import BatonError, Cancelled, EngineDead, EngineFailed, InvalidRequest, Unsupported
from baton.models.directory import read_config
from baton.models.placeholders import read_media_info
from baton.models.tokenizer import HubTokenizer
from baton.ports.engine import Capabilities, Encoded, EncodeWork, EngineInfo, Progress
from baton.protocol.commands import Command, Outcome
from baton.protocol.events import Reading
from baton.protocol.ids import RequestId

log = logging.getLogger(__name__)


class _Encoding:
    """One request, from the call until its embeddings are released. The only owner of the library's result."""

    def __init__(self, work: EncodeWork) -> None:
        self.work = work
        self.aborted = False
        self.unread = False
        self.result: EncodeResult | None = None
        self.thread: asyncio.Task[dict[str, object]] | None = None

    @property
    def is_abortable(self) -> bool:
        """Whether the library computes it: an abort before that could not reach the library."""
        return self.result is not None and self.thread is not None and not self.thread.done()

    def release(self) -> list[Handle]:
        """Hold the result no longer; return the handles of its embeddings."""
        result, self.result = self.result, None
        params = None if result is None else result.disaggregated_params
        return [] if params is None else params.multimodal_embedding_handles or []


class _Running(msgspec.Struct, frozen=True, kw_only=True):
    """What exists once the encoder has started."""

    library: Library
    encoder: Encoder
    prompts: MediaPrompts
    sending: threading.Lock

    def compute(self, encoding: _Encoding) -> dict[str, object]:
        """On a thread: encode, and return the handles. Raises the error of the request or of the encoder."""
        work = encoding.work
        if not work.media:
            raise InvalidRequest("multi_modal_data: there is no image to encode")
        prompt = self.prompts.build(work.token_ids, work.media)
        try:
            result = encoding.result = self._submit(self._preprocess(prompt), encoding)
            if result is None:
                return {}
            self.abort_if_asked(encoding)
            result.result()
        except BatonError:
            raise
        except Exception as error:
            raise lifecycle.translate(error, self.encoder, self.library) from error
        if encoding.aborted:
            return {}
        return media_handles.to_wire(result.disaggregated_params, len(work.media))

    def abort_if_asked(self, encoding: _Encoding) -> None:
        """On a thread: end a request that has been aborted as soon as the library can."""
        if encoding.aborted and encoding.is_abortable and encoding.result is not None:
            with self.sending:
                _send_abort(encoding.work.request_id, encoding.result)

    def _preprocess(self, prompt: PromptFields) -> PromptFields | PreprocessedInputs13:
        """Since 1.3, preprocessing does not need the socket. Raises EngineFailed: the images have been read already."""
        if not self.library.features.preprocessing:
            return prompt
        # The prompt is complete, also where it reaches the library as text.
        sampling = self.library.sampling_params(add_special_tokens=False)
        try:
            return cast(Encoder13, self.encoder).preprocess(inputs=prompt, sampling_params=sampling)
        except Exception as error:
            raise EngineFailed(f"TensorRT-LLM cannot preprocess the images: {error!r}") from error

    def _submit(self, inputs: PromptFields | PreprocessedInputs13, encoding: _Encoding) -> EncodeResult | None:
        """Return None if the request has been aborted. Raises EngineFailed, or the library's error."""
        if encoding.aborted:
            discard(inputs)
            return None
        try:
            with self.sending:
                return self.encoder.generate_async(inputs=inputs)
        except (self.library.request_error, ValueError, TypeError) as error:
            discard(inputs)
            raise EngineFailed(f"TensorRT-LLM cannot encode the images: {error!r}") from error

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
        self._tasks: set[asyncio.Task[None]] = set()
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
        media = await run_in_thread("trtllm-tokenizer", lambda: read_media_info(self._model_dir))
        library = await load_library(self._given_library)
        encoder = await self._lifecycle.build(
            lambda: make_encoder(library, build_encoder_arguments(library, self._tree))
        )
        self._lifecycle.start_health_checks(encoder, library)
        prompts = MediaPrompts(library, tokenizer, media)
        self._running = _Running(library=library, encoder=encoder, prompts=prompts, sending=threading.Lock())
        return EngineInfo(
            model_name=self._name,
            model_dir=str(self._model_dir),
            context_length=config.max_position_embeddings or 1,
            block_size=1,
            total_blocks=1,
            max_running=self._max_running,
            eos_token_ids=config.eos_token_ids,
            media=media,
        )

    async def abort(self, request_id: RequestId) -> None:
        """See `AbortableEngine.abort`. Waits for the library up to `Timeouts.abort_s`."""
        if (held := self._held.pop(request_id, None)) is not None:
            if held.unread and self._running is not None:
                self._discard(held, self._running)
            else:
                held.release()
        encoding = self._encodings.get(request_id)
        if encoding is not None:
            self._abort(encoding)
            if encoding.thread is not None:
                await asyncio.wait([encoding.thread], timeout=self._timeouts.abort_s)

    def mark_unread(self, request_id: RequestId) -> None:
        """See `HandleEngine.mark_unread`."""
        if (held := self._held.get(request_id)) is not None:
            held.unread = True

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

    def readings(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`."""
        return load_readings(self.progress, self._ended)

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
        self._abort(encoding)
        if encoding.thread is not None:
            encoding.thread.add_done_callback(lambda _: self._discard(encoding, running))

    def _abort(self, encoding: _Encoding) -> None:
        """The library may be busy with another request, which must not block the event loop: on a thread."""
        encoding.aborted = True
        running = self._running
        if running is not None and encoding.is_abortable:
            self._start("trtllm-abort", lambda: running.abort_if_asked(encoding))

    def _discard(self, encoding: _Encoding, running: _Running) -> None:
        if encoding.result is not None:
            self._start("trtllm-discard", lambda: running.discard(encoding))

    def _start(self, name: str, work: Callable[[], None]) -> None:
        task = asyncio.create_task(run_in_thread(name, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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


def _send_abort(request_id: RequestId, result: EncodeResult) -> None:
    try:
        result.abort()
    except Exception as error:  # noqa: BLE001 - an encoder that has ended has nothing to abort
        log.debug("%s cannot be aborted: %r", request_id, error)
