"""From media files to patches of pixels, with the model's own processors of Hugging Face, and to expansions of prompts.

Every method is slow: call it on a thread. Imports no SGLang.
"""

import logging
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from baton.engine_kit.content_hash import rows_hash
from baton.engines.sglang.vision_model import WITH_TIMESTAMPS, VisionModel
from baton.errors import ConfigError, InvalidRequest
from baton.media.images import decode_image
from baton.media.video import by_fps, decode_video
from baton.models.tokenizer import HubTokenizer
from baton.protocol.media import EncodedItem, MediaFile

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

VIDEO_FPS = 2.0  # the rate at which these models were trained

Grid = tuple[int, int, int]


class Patches(NamedTuple):
    """One item before it is encoded: `pixels` are [patches, numbers of a patch], in the order of the rows."""

    item: EncodedItem
    pixels: "Tensor"


class Preprocessor:
    """Preprocesses files for the encoder `identity` of the model in `model_dir`. Any thread. Raises ConfigError."""

    def __init__(self, model_dir: Path, model: VisionModel, identity: str) -> None:
        import transformers

        library: Any = transformers
        self._model = model
        self._identity = identity
        self._tokenizer = HubTokenizer(model_dir)
        try:
            self._images = library.AutoImageProcessor.from_pretrained(model_dir, local_files_only=True)
            self._videos = library.AutoVideoProcessor.from_pretrained(model_dir, local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"the processor of the model in {model_dir} cannot be loaded: {error}") from error

    def prepare(self, file: MediaFile) -> Patches:
        """Return the patches of `file`, and what it becomes in a prompt. Raises InvalidRequest."""
        try:
            return self._video(file) if file.modality == "video" else self._image(file)
        except (ValueError, TypeError) as error:  # what the processors raise for sizes that they do not take
            raise InvalidRequest(f"{file.place}: the model's processor does not take it: {error}") from error

    def _image(self, file: MediaFile) -> Patches:
        prepared = self._images(images=[decode_image(file)], return_tensors="pt")
        grid = _grid(prepared["image_grid_thw"])
        return self._patches(file, prepared["pixel_values"], grid, [(self._model.tokens["image"], self._rows(grid))])

    def _video(self, file: MediaFile) -> Patches:
        import torch

        video = decode_video(file, by_fps(VIDEO_FPS, self._videos.min_frames, self._videos.max_frames))
        frames = torch.from_numpy(video.frames).permute(0, 3, 1, 2)
        prepared = self._videos(videos=[frames], do_sample_frames=False, return_tensors="pt")
        grid = _grid(prepared["video_grid_thw"])
        pixels = prepared["pixel_values_videos"]
        if self._model.model_type in WITH_TIMESTAMPS:
            times = _patch_times([n / video.info.fps for n in video.indices], self._model.temporal_patch, grid[0])
            runs = list(self._frame_runs(times, self._rows(grid) // grid[0]))
            return self._patches(file, pixels, grid, runs, timestamps=tuple(times))
        sampled_fps = len(video.indices) / video.info.frames * video.info.fps
        runs = [(self._model.tokens["video"], self._rows(grid))]
        return self._patches(file, pixels, grid, runs, seconds_per_grid=self._model.temporal_patch / sampled_fps)

    def _frame_runs(self, times: Sequence[float], rows: int) -> Iterator[tuple[int, int]]:
        """Yield the expansion of a video whose frames each follow their time, written out."""
        for time in times:
            for token, repeated in groupby(self._tokenizer.encode(f"<{time:.1f} seconds>")):
                yield token, len(list(repeated))
            yield self._model.start_token, 1
            yield self._model.tokens["video"], rows
            yield self._model.end_token, 1

    def _patches(
        self, file: MediaFile, pixels: "Tensor", grid: Grid, runs: Sequence[tuple[int, int]], **places: Any
    ) -> Patches:
        item = EncodedItem(
            modality=file.modality,
            content_hash=rows_hash(self._identity, file.data, file.modality),
            expansion=tuple(runs),
            embed_token=self._model.tokens[file.modality],
            rows=self._rows(grid),
            grid=(grid,),
            **places,
        )
        return Patches(item, pixels)

    def _rows(self, grid: Grid) -> int:
        time, height, width = grid
        return time * height * width // self._model.patches_per_row


def _grid(grids: "Tensor") -> Grid:
    time, height, width = grids[0].tolist()
    return time, height, width


def _patch_times(times: Sequence[float], frames: int, patches: int) -> list[float]:
    """Return the time of each patch: the mean of its first and its last frame. The last frame fills the last patch."""
    filled = [*times, *[times[-1]] * (patches * frames - len(times))]
    return [(filled[n * frames] + filled[(n + 1) * frames - 1]) / 2 for n in range(patches)]
