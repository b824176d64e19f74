"""Media of an engine that generates: what its rows are, and files as patches of pixels, which SGLang encodes itself.

SGLang's schedulers have the tower, and no other process can call it. So this worker only preprocesses its own media,
and a row of them is the patches that the tower makes one row of. An engine that takes rows of encode workers takes only
those: a batch of SGLang cannot have both.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.engines.sglang.placed_media import PlacedMediaProcessor
from baton.engines.sglang.preprocessing import Patches, Preprocessor
from baton.engines.sglang.sglang_types import Manager
from baton.engines.sglang.vision_model import VisionModel, identify_encoder, placeholders_of, read_vision_model
from baton.errors import Unsupported
from baton.media.decoding import run_decoding
from baton.ports.engine import Capabilities, Encoded, EncodedRows, EncodeWork, MediaInfo
from baton.ports.transfer import EmbeddingShape
from baton.protocol.media import MediaFile

if TYPE_CHECKING:
    from torch import Tensor


class OwnMedia:
    """The media of one started engine. `info` is what `EngineInfo.media` says of them."""

    def __init__(self, model: VisionModel, info: MediaInfo, preprocessor: Preprocessor | None) -> None:
        self.info = info
        self._model = model
        self._preprocessor = preprocessor

    async def encode(self, work: EncodeWork) -> Encoded:
        """See `EncodeEngine.encode`."""
        if self._preprocessor is None:
            raise Unsupported("this engine takes media from encode workers and does not encode them itself")
        patches = await prepare_all(self._preprocessor, work.media)
        return Encoded(items=tuple(self._rows(each) for each in patches))

    def _rows(self, patches: Patches) -> EncodedRows:
        shape = self.info.shape
        return EncodedRows(item=patches.item, dtype=shape.dtype, size=shape.size, data=as_bytes(patches.pixels, shape))


async def open_own_media(model_dir: Path, manager: Manager, can: Capabilities) -> OwnMedia | None:
    """Let SGLang take media that are placed in prompts; return None for models without such media."""
    if not can.media_embeddings:
        return None
    media = await asyncio.to_thread(_load, model_dir, manager, can)
    manager.mm_processor = PlacedMediaProcessor(manager.mm_processor, media[0])
    return OwnMedia(*media)


def _load(model_dir: Path, manager: Manager, can: Capabilities) -> tuple[VisionModel, MediaInfo, Preprocessor | None]:
    model = read_vision_model(model_dir)
    assert model is not None, "an engine that takes placed media has a vision model"
    identity, size = identify_encoder(model_dir), model.row_size
    if can.media_encoding:
        identity, size = f"{identity}-pixels", model.pixel_row_size
    shape = EmbeddingShape(model=identity, dtype=str(manager.model_config.dtype).removeprefix("torch."), size=size)
    info = MediaInfo(shape=shape, placeholders=placeholders_of(model_dir, model))
    return model, info, Preprocessor(model_dir, model, identity) if can.media_encoding else None


async def prepare_all(preprocessor: Preprocessor, files: Sequence[MediaFile]) -> list[Patches]:
    """Preprocess `files`, on threads, and return their patches in order. Raises InvalidRequest."""
    return await asyncio.gather(*(run_decoding(preprocessor.prepare, file) for file in files))


def as_bytes(rows: "Tensor", shape: EmbeddingShape) -> memoryview:
    """Return the numbers of `rows` in the type of `shape`, on the host."""
    import torch

    converted = rows.to(device="cpu", dtype=getattr(torch, shape.dtype)).contiguous()
    numbers: Any = converted.view(torch.uint8).numpy()
    return memoryview(numbers).cast("B")
