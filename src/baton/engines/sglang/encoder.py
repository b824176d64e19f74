"""The encode port over SGLang's vision tower: media files in, rows for language workers out.

encode ──► preprocessed on threads ──► queue ──► tower's thread: a batch of one modality ──► rows
"""

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from baton.config.engines import SglangOptions
from baton.engine_kit.load_readings import load_readings
from baton.engines.sglang.compat import choose_device
from baton.engines.sglang.launch_mode import LaunchMode
from baton.engines.sglang.own_media import as_bytes, prepare_all
from baton.engines.sglang.preprocessing import Preprocessor
from baton.engines.sglang.server_args import check_arguments
from baton.engines.sglang.tower import Tower
from baton.engines.sglang.tower_queue import TowerQueue
from baton.engines.sglang.vision_model import (
    MODALITIES,
    MODEL_TYPES,
    VisionModel,
    identify_encoder,
    placeholders_of,
    read_vision_model,
)
from baton.errors import BatonError, ConfigError, EngineDead, Unsupported
from baton.models.directory import read_config
from baton.ports.engine import Capabilities, Encoded, EncodedRows, EncodeWork, EngineInfo, MediaInfo, Progress
from baton.ports.transfer import EmbeddingShape
from baton.protocol.commands import Command, Outcome
from baton.protocol.events import Reading
from baton.protocol.ids import RequestId

MAX_RUNNING = 64


class _Loaded(NamedTuple):
    """What exists once the encoder has started."""

    tower: Tower
    preprocessor: Preprocessor
    info: MediaInfo


class SglangEncoder:
    """An EncodeEngine (see `ports/engine.py`) with the tower of the model in `model_dir`. `args` are SGLang's own.

    The constructor imports SGLang, which takes seconds. Raises ConfigError.
    """

    def __init__(self, options: SglangOptions, args: tuple[str, ...], model_dir: Path, name: str) -> None:
        choose_device(args)
        model = read_vision_model(model_dir)
        if model is None:
            known = ", ".join(sorted(MODEL_TYPES))
            raise ConfigError(f"the model in {model_dir} is none whose media SGLang encodes on their own: {known}")
        self._model: VisionModel = model
        self._arguments = check_arguments(LaunchMode(encoding=True), options, args, model_dir, name)
        self._model_dir = model_dir
        self._name = name
        self._thread = ThreadPoolExecutor(1, "sglang-tower")
        self._loaded: _Loaded | None = None
        self._queue: TowerQueue | None = None
        self._calls = 0
        self._prepared = 0
        self._dead: BatonError | None = None
        self._ended = asyncio.Event()

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        return Capabilities(generate=False, media_encoding=True, encoded_modalities=MODALITIES)

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        config = read_config(self._model_dir)
        loaded = await asyncio.get_running_loop().run_in_executor(self._thread, self._load)
        if self._dead is not None:
            await self._close_tower(loaded.tower)
            raise self._dead
        self._loaded = loaded
        self._queue = TowerQueue(loaded.tower.encode, self._thread)
        return EngineInfo(
            model_name=self._name,
            model_dir=str(self._model_dir),
            context_length=config.max_position_embeddings or 1,
            block_size=1,
            total_blocks=1,
            max_running=MAX_RUNNING,
            eos_token_ids=config.eos_token_ids,
            media=loaded.info,
        )

    async def encode(self, work: EncodeWork) -> Encoded:
        """See `EncodeEngine.encode`."""
        loaded, queue = self._alive()
        self._calls += 1
        try:
            patches = await prepare_all(loaded.preprocessor, work.media)
            self._prepared += 1
            rows = await queue.encode(patches)
        finally:
            self._calls -= 1
        shape = loaded.info.shape
        return Encoded(
            items=tuple(
                EncodedRows(item=each.item, dtype=shape.dtype, size=shape.size, data=as_bytes(tensor, shape))
                for each, tensor in zip(patches, rows, strict=True)
            )
        )

    async def abort(self, request_id: RequestId) -> None:
        """See `AbortableEngine.abort`. Of rows nothing is held."""

    async def execute(self, command: Command) -> Outcome:
        """See `Engine.execute`."""
        raise Unsupported("an encoder has no commands")

    def readings(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`."""
        return load_readings(self.progress, self._ended)

    def metrics(self) -> str:
        """See `Engine.metrics`. SGLang has none of a tower without its servers."""
        return ""

    def progress(self) -> Progress:
        """See `Engine.progress`."""
        batches = self._queue.batches if self._queue is not None else 0
        return Progress(self._prepared + batches, self._calls, 0)

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._dead = self._dead or EngineDead("the engine has stopped")
        self._ended.set()
        if self._queue is not None:
            await self._queue.close(self._dead)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            await self._close_tower(loaded.tower)
        self._thread.shutdown(wait=False)

    def _load(self) -> _Loaded:
        """On the tower's thread."""
        tower = Tower(self._arguments)
        try:
            identity = identify_encoder(self._model_dir)
            shape = EmbeddingShape(
                model=identity, dtype=str(tower.dtype).removeprefix("torch."), size=self._model.row_size
            )
            info = MediaInfo(shape=shape, placeholders=placeholders_of(self._model_dir, self._model))
            return _Loaded(tower, Preprocessor(self._model_dir, self._model, identity), info)
        except BaseException:
            tower.close()
            raise

    async def _close_tower(self, tower: Tower) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, tower.close)

    def _alive(self) -> tuple[_Loaded, TowerQueue]:
        if self._dead is not None or self._loaded is None or self._queue is None:
            raise self._dead or EngineDead("the engine is not running")
        return self._loaded, self._queue
