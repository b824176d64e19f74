"""The Idefics3 and SmolVLM layout: its configuration, the frames of an image, and what they are in a prompt.

An image becomes one square frame; with image splitting it becomes a grid of frames of its own resolution, and one frame
of all of it.
"""

import functools
import math
from collections.abc import Callable
from itertools import groupby

import msgspec
import numpy as np
from tokenizers import Tokenizer

from baton.engines.torch.vision.files import VisionFiles
from baton.engines.torch.vision.pixels import Colours, Pixels, PreparedMedia, cut_patches, resize
from baton.errors import ConfigError
from baton.protocol.media import EncodedItem

# The longest edge of an image whatever the processor is configured to.
_MAX_EDGE = 4096
_AROUND = "<fake_token_around_image>"
_WHOLE = "<global-img>"  # before the rows of the whole image
_STANDARD = (0.5, 0.5, 0.5)


class Idefics3Vision(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the tower."""

    hidden_size: int = 1152
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 32
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6


class _Text(msgspec.Struct, frozen=True, kw_only=True):
    hidden_size: int


class Idefics3Config(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json; a row covers `scale_factor` x `scale_factor` patches."""

    text_config: _Text
    vision_config: Idefics3Vision = Idefics3Vision()
    scale_factor: int = 2
    image_token_id: int = 128257


class _Edge(msgspec.Struct, frozen=True, kw_only=True):
    longest_edge: int


class Idefics3Images(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the image processor."""

    do_resize: bool = True
    size: _Edge = _Edge(longest_edge=4 * 364)
    max_image_size: _Edge = _Edge(longest_edge=364)
    resample: int = 1
    do_image_splitting: bool = True


class _Processor(msgspec.Struct, frozen=True, kw_only=True):
    image_seq_len: int | None = None


class Idefics3Layout:
    """A VisionLayout (see `model.py`)."""

    def __init__(self, files: VisionFiles, tokenizer: Tokenizer) -> None:
        self.config = files.convert(files.config, Idefics3Config, "config.json")
        self.images = files.convert(files.images, Idefics3Images, "the image processor")
        self.size = self.config.text_config.hidden_size
        colours = {"image_mean": _STANDARD, "image_std": _STANDARD, **files.images}
        self.colours = files.convert(colours, Colours, "the image processor")
        self.placeholders = {"image": self.config.image_token_id}
        self.around_rows: tuple[tuple[str, ...], tuple[str, ...]] = ((_AROUND, _WHOLE), (_AROUND,))
        self._tokenizer = tokenizer
        self._frame_rows = self._check_frame(files)
        self._expansion = functools.cache(self._make_expansion)

    def identity(self) -> object:
        """See `VisionLayout.identity`."""
        return self.config, self.images, self.colours

    def prepare_image(self, pixels: Pixels, content_hash: str) -> PreparedMedia:
        """See `VisionLayout.prepare_image`."""
        frames, down, across = split_image(pixels, self.images)
        side = frames.shape[1] // self.config.vision_config.patch_size
        item = EncodedItem(
            modality="image",
            content_hash=content_hash,
            expansion=self._expansion(down, across),
            embed_token=self.config.image_token_id,
            rows=len(frames) * self._frame_rows,
        )
        return PreparedMedia(item, cut_patches(frames, self.config.vision_config.patch_size), (side, side))

    def _check_frame(self, files: VisionFiles) -> int:
        """Return the rows of a frame. Raises ConfigError if its size does not fit the tower or the prompt."""
        tower, frame = self.config.vision_config, self.images.max_image_size.longest_edge
        side = frame // tower.patch_size
        if not side or side % self.config.scale_factor or tower.hidden_size % tower.num_attention_heads:
            raise ConfigError(
                f"{files.directory}: frames of {frame} pixels with patches of {tower.patch_size}, merged by"
                f" {self.config.scale_factor}, do not fit the vision tower"
            )
        rows = (side // self.config.scale_factor) ** 2
        expected = files.convert(files.processor, _Processor, "processor_config.json").image_seq_len
        if expected not in (None, rows):
            raise ConfigError(f"{files.directory}: a frame has {rows} rows, but image_seq_len is {expected}")
        return rows

    def _make_expansion(self, down: int, across: int) -> tuple[tuple[int, int], ...]:
        """Return the tokens of a split image, or of one with a single frame if `down` is 0, as runs."""
        image = (self._tokenizer.id_to_token(self.config.image_token_id) or "") * self._frame_rows
        grid = "".join(
            "".join(f"{_AROUND}<row_{row + 1}_col_{column + 1}>{image}" for column in range(across)) + "\n"
            for row in range(down)
        )
        if grid:
            grid += "\n"
        text = f"{grid}{_AROUND}{_WHOLE}{image}{_AROUND}"
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tuple((token, len(list(run))) for token, run in groupby(tokens))


def split_image(pixels: Pixels, images: Idefics3Images) -> tuple[Pixels, int, int]:
    """Return the frames of an image [frame, y, x, colour], and how many of them are below and beside each other.

    The frame of the whole image is the last one. If it is the only one, there are 0 of the others.
    """
    frame = images.max_image_size.longest_edge
    if images.do_resize:
        pixels = _resized(pixels, _longest_edge_size, images.size.longest_edge, images)
    if images.do_image_splitting:
        pixels = _resized(pixels, _multiple_size, frame, images)
        down, across = pixels.shape[0] // frame, pixels.shape[1] // frame
        if down * across > 1:
            grid = pixels.reshape(down, frame, across, frame, -1).swapaxes(1, 2).reshape(-1, frame, frame, 3)
            whole = resize(pixels, frame, frame, images.resample)
            return np.concatenate((grid, whole[None])), down, across
        return pixels[None], 0, 0
    return resize(pixels, frame, frame, images.resample)[None], 0, 0


def _resized(
    pixels: Pixels, size: Callable[[int, int, int], tuple[int, int]], unit: int, images: Idefics3Images
) -> Pixels:
    height, width = size(pixels.shape[0], pixels.shape[1], unit)
    return resize(pixels, height, width, images.resample)


def _longest_edge_size(height: int, width: int, longest: int) -> tuple[int, int]:
    """Return the size with `longest` as the longer edge and about the same aspect ratio; the other edge is even."""
    aspect = width / height
    if width >= height:
        width, height = longest, _even(int(longest / aspect))
    else:
        height, width = longest, _even(int(longest * aspect))
    return _below_max_edge(max(height, 1), max(width, 1))


def _even(length: int) -> int:
    return length + length % 2


def _below_max_edge(height: int, width: int) -> tuple[int, int]:
    aspect = width / height
    if width >= height and width > _MAX_EDGE:
        width, height = _MAX_EDGE, int(_MAX_EDGE / aspect)
    elif height > width and height > _MAX_EDGE:
        height, width = _MAX_EDGE, int(_MAX_EDGE * aspect)
    return max(height, 1), max(width, 1)


def _multiple_size(height: int, width: int, frame: int) -> tuple[int, int]:
    """Return the size in whole frames: the longer edge is rounded up first, and the other one follows it."""
    aspect = width / height
    if width >= height:
        width = math.ceil(width / frame) * frame
        height = math.ceil(int(width / aspect) / frame) * frame
    else:
        height = math.ceil(height / frame) * frame
        width = math.ceil(int(height * aspect) / frame) * frame
    return height, width
