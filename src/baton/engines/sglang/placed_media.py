"""Media of prompts whose placeholders have been expanded, as SGLang's own processor of media would return them.

SGLang's processor expands placeholders itself, from text, and hashes what it is given. Here the items say where they
are and what they are: embeddings, patches of pixels, or nothing where the KV comes from another engine.
"""

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from baton.engines.sglang.vision_model import VisionModel
from baton.errors import InvalidRequest
from baton.protocol.media import EncodedItem, MediaEmbedding

if TYPE_CHECKING:
    from torch import Tensor


class PlacedMedia(NamedTuple):
    """The media of one prompt; it takes the place of files in a request of SGLang."""

    items: tuple[MediaEmbedding, ...]


class PlacedMediaProcessor:
    """Processes `PlacedMedia`; everything else is done by `own`, SGLang's processor for the model."""

    def __init__(self, own: Any, model: VisionModel) -> None:
        self._own = own
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    async def process_mm_data_async(
        self, image_data: Any, audio_data: Any, input_text: Any, request_obj: Any, **more: Any
    ) -> Any:
        """See `BaseMultimodalProcessor.process_mm_data_async` of SGLang."""
        if image_data and isinstance(image_data[0], PlacedMedia):
            return await asyncio.to_thread(_output, self._model, image_data[0], list(request_obj.input_ids))
        return await self._own.process_mm_data_async(
            image_data=image_data, audio_data=audio_data, input_text=input_text, request_obj=request_obj, **more
        )


def _output(model: VisionModel, placed: PlacedMedia, token_ids: list[int]) -> Any:
    from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput as Output

    media = sorted(placed.items, key=lambda item: item.position)  # rows are scattered in the order of the prompt
    items = [_data_item(model, item) for item in media]
    positions, delta = _positions(model, [item.item for item in media], token_ids)
    return Output(
        mm_items=items,
        input_ids=token_ids,
        padded_input_ids=Output.build_padded_input_ids(token_ids, items),
        im_token_id=model.tokens["image"],
        video_token_id=model.tokens["video"],
        im_start_id=model.start_token,
        im_end_id=model.end_token,
        mrope_positions=positions,
        mrope_position_delta=delta,
    )


def _data_item(model: VisionModel, media: MediaEmbedding) -> Any:
    import torch
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    item = media.item
    made = MultimodalDataItem(
        modality=Modality.from_str(item.modality),
        offsets=list(row_ranges(item, media.position)),
        model_specific_data={f"{item.modality}_grid_thw": torch.tensor(item.grid, dtype=torch.int64)},
    )
    # SGLang's prefix cache tells media apart by it.
    made.set_identity(hashlib.sha256(item.content_hash.encode()).digest())
    rows = None if media.data is None else rows_of(media)
    if rows is not None and media.size == model.row_size:
        made.precomputed_embeddings = rows
    elif rows is not None:
        made.feature = rows.reshape(-1, model.patch_numbers)
    return made


def row_ranges(item: EncodedItem, position: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last token of each run of rows of an item that begins at `position`."""
    for token, count in item.expansion:
        if token == item.embed_token:
            yield position, position + count - 1
        position += count


def rows_of(media: MediaEmbedding) -> "Tensor":
    """Return the rows as [rows, size]. Raises InvalidRequest if they are not what the item says."""
    import torch

    dtype = getattr(torch, media.dtype, None)
    if not isinstance(dtype, torch.dtype) or media.data is None:
        raise InvalidRequest(f"media: there are no rows of type {media.dtype}")
    try:
        return torch.frombuffer(bytearray(media.data), dtype=dtype).reshape(media.item.rows, media.size)
    except (RuntimeError, ValueError) as error:
        raise InvalidRequest(
            f"media: {media.data.nbytes} bytes are not {media.item.rows} rows of {media.size} {media.dtype}"
        ) from error


def _positions(model: VisionModel, items: Sequence[EncodedItem], token_ids: list[int]) -> "tuple[Tensor, Tensor]":
    """Return the positions in time, height and width of every token, and what later tokens add to their index."""
    import torch
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding

    seconds = [item.seconds_per_grid for item in items if item.seconds_per_grid is not None]
    positions, delta = MRotaryEmbedding.get_rope_index(
        spatial_merge_size=model.merge,
        image_token_id=model.tokens["image"],
        video_token_id=model.tokens["video"],
        vision_start_token_id=model.start_token,
        model_type=model.model_type,
        tokens_per_second=model.tokens_per_second,
        input_ids=torch.tensor([token_ids]),
        image_grid_thw=_grids(items, "image"),
        video_grid_thw=_grids(items, "video"),
        second_per_grid_ts=torch.tensor(seconds) if seconds else None,
    )
    return positions.squeeze(1), delta


def _grids(items: Sequence[EncodedItem], modality: str) -> "Tensor | None":
    import torch

    grids = list(chain.from_iterable(item.grid for item in items if item.modality == modality))
    return torch.tensor(grids, dtype=torch.int64) if grids else None
