"""The Qwen2.5-VL layout: its configuration, and the patches of images and video. Images keep their aspect ratio."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from baton.engines.torch.vision.files import VisionFiles
from baton.engines.torch.vision.pixels import Colours, Pixels, PreparedMedia, cut_patches, resize
from baton.errors import ConfigError, InvalidRequest
from baton.protocol.media import EncodedItem

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_MAX_ASPECT = 200
_FPS = 2.0


class _Rope(msgspec.Struct, frozen=True, kw_only=True):
    rope_theta: float = 10000.0


class QwenVision(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the tower. Windows have `window_size` pixels; the blocks `fullatt_block_indexes` have none."""

    depth: int = 32
    hidden_size: int = 3584
    hidden_act: str = "silu"
    intermediate_size: int = 3420
    num_heads: int = 16
    patch_size: int = 14
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    window_size: int = 112
    out_hidden_size: int = 3584
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    rope_parameters: _Rope | None = None


class QwenConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json."""

    vision_config: QwenVision = QwenVision()
    image_token_id: int = 151655
    video_token_id: int = 151656


class _Context(msgspec.Struct, frozen=True, kw_only=True):
    max_position_embeddings: int = 32768


class _Range(msgspec.Struct, frozen=True, kw_only=True):
    """The number of pixels of an image, in spite of the names."""

    shortest_edge: int | None = None
    longest_edge: int | None = None


class QwenPixels(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the processor of images, or of video."""

    do_resize: bool = True
    size: _Range = _Range()
    min_pixels: int | None = None
    max_pixels: int | None = None
    resample: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    num_frames: int | None = None
    fps: float | None = None
    min_frames: int = 4
    max_frames: int = 768

    def sized(self, fewest: int, most: int) -> "QwenPixels":
        """Return it with the limits of the size in `min_pixels` and `max_pixels`, which are the given ones if unset."""
        return msgspec.structs.replace(
            self,
            size=_Range(),
            min_pixels=self.min_pixels or self.size.shortest_edge or fewest,
            max_pixels=self.max_pixels or self.size.longest_edge or most,
        )


class QwenLayout:
    """A VisionLayout (see `model.py`), with video."""

    def __init__(self, files: VisionFiles) -> None:
        self.config = files.convert(files.config, QwenConfig, "config.json")
        text = files.config.get("text_config") or files.config  # older files have no text_config
        self._context = files.convert(text, _Context, "config.json").max_position_embeddings
        images = files.convert(files.images, QwenPixels, "the image processor")
        video = files.convert(files.video, QwenPixels, "the video processor")
        self.images = images.sized(56 * 56, 28 * 28 * 1280)
        self.video = video.sized(128 * 28 * 28, 28 * 28 * 768)
        for pixels in (self.images, self.video):
            _check(files, pixels, self.config.vision_config)
        self.size = self.config.vision_config.out_hidden_size
        self.colours, video_colours = (
            files.convert({"image_mean": _CLIP_MEAN, "image_std": _CLIP_STD, **fields}, Colours, "a processor")
            for fields in (files.images, files.video)
        )
        if self.colours != video_colours:
            raise ConfigError(f"{files.directory}: images and video have different colours, which is not supported")
        self.placeholders = {"image": self.config.image_token_id, "video": self.config.video_token_id}
        self.around_rows: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def identity(self) -> object:
        """See `VisionLayout.identity`."""
        return self.config, self.images, self.video, self.colours

    def prepare_image(self, pixels: Pixels, content_hash: str) -> PreparedMedia:
        """See `VisionLayout.prepare_image`."""
        height, width = self._size(1, pixels, self.images)
        frame = resize(pixels, height, width, self.images.resample)
        frames = np.repeat(frame[None], self.images.temporal_patch_size, axis=0)
        return self._prepare("image", frames, self.images, content_hash)

    def sample_frames(self, frames: int, fps: float) -> list[int]:
        """See `VideoLayout.sample_frames`."""
        unit = self.video.temporal_patch_size
        if self.video.num_frames is not None:
            wanted = float(self.video.num_frames)
        else:
            wanted = max(frames / fps * (self.video.fps or _FPS), self.video.min_frames)
        count = max(1, int(min(wanted, self.video.max_frames, frames)) // unit * unit)
        return [int(number * (frames / count)) for number in range(count)]

    def prepare_video(
        self, frames: Pixels, timestamps: Sequence[float], fps: float, content_hash: str
    ) -> PreparedMedia:
        """See `VisionLayout.prepare_video`."""
        video = self.video
        height, width = self._size(math.ceil(len(frames) / video.temporal_patch_size), frames[0], video)
        resized = np.stack([resize(frame, height, width, video.resample) for frame in frames])
        if missing := -len(resized) % video.temporal_patch_size:
            resized = np.concatenate((resized, np.repeat(resized[-1:], missing, axis=0)))
        prepared = self._prepare("video", resized, video, content_hash)
        timed = msgspec.structs.replace(
            prepared.item, seconds_per_grid=video.temporal_patch_size / fps, timestamps=tuple(timestamps)
        )
        return prepared._replace(item=timed)

    def _size(self, parts: int, frame: Pixels, pixels: QwenPixels) -> tuple[int, int]:
        """Return the size of frames like `frame`. Raises InvalidRequest if so many parts can fit into no prompt."""
        height, width = smart_size(frame.shape[0], frame.shape[1], pixels)
        rows = parts * height * width // (pixels.patch_size * pixels.merge_size) ** 2
        if rows > self._context:
            raise InvalidRequest(f"it takes {rows} tokens of the prompt, more than the context of {self._context}")
        return height, width

    def _prepare(self, modality: str, frames: Pixels, pixels: QwenPixels, content_hash: str) -> PreparedMedia:
        patches = cut_patches(frames, pixels.patch_size, pixels.merge_size, pixels.temporal_patch_size)
        grid = frames.shape[1] // pixels.patch_size, frames.shape[2] // pixels.patch_size
        rows = len(patches) * math.prod(grid) // pixels.merge_size**2
        token = self.placeholders[modality]
        item = EncodedItem(
            modality=modality,
            content_hash=content_hash,
            expansion=((token, rows),),
            embed_token=token,
            rows=rows,
            grid=((len(patches), *grid),),
        )
        return PreparedMedia(item, patches, grid)


def smart_size(height: int, width: int, pixels: QwenPixels) -> tuple[int, int]:
    """Return the size in whole rows of the language model, with about the same aspect ratio, within the limits.

    Raises InvalidRequest for an image that is too long and narrow.
    """
    if max(height, width) / min(height, width) > _MAX_ASPECT:
        raise InvalidRequest(f"one edge of {width} x {height} pixels is more than {_MAX_ASPECT} times the other")
    fewest, most, unit = pixels.min_pixels or 1, pixels.max_pixels or 1, pixels.patch_size * pixels.merge_size
    down, across = round(height / unit), round(width / unit)
    if down * across * unit**2 > most:
        shrink = math.sqrt((height * width) / most)
        down, across = max(1, math.floor(height / shrink / unit)), max(1, math.floor(width / shrink / unit))
    elif down * across * unit**2 < fewest:
        grow = math.sqrt(fewest / (height * width))
        down, across = math.ceil(height * grow / unit), math.ceil(width * grow / unit)
    return down * unit, across * unit


def _check(files: VisionFiles, pixels: QwenPixels, tower: QwenVision) -> None:
    """Raise ConfigError if the patches of a processor do not fit the tower."""
    processor = (pixels.patch_size, pixels.merge_size, pixels.temporal_patch_size)
    expected = (tower.patch_size, tower.spatial_merge_size, tower.temporal_patch_size)
    if processor != expected:
        raise ConfigError(
            f"{files.directory}: the processor cuts patches of {processor} (size, merge, frames), the tower has"
            f" {expected}"
        )
    if not pixels.do_resize:
        raise ConfigError(f"{files.directory}: do_resize false is not supported for this model")
    if tower.window_size < tower.patch_size * tower.spatial_merge_size or tower.hidden_size % (4 * tower.num_heads):
        raise ConfigError(f"{files.directory}: vision_config has sizes that do not divide")
