"""Pixels: colours as the tower gets them, resizing, and the cut into patches. numpy and Pillow only.

Results are equal to the bit to those of the image processors of transformers on Pillow.
"""

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from baton.protocol.media import EncodedItem

Pixels = NDArray[np.uint8]


class Colours(msgspec.Struct, frozen=True, kw_only=True):
    """How the value of a colour becomes a number: scaled, then shifted and scaled for each channel."""

    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]

    def table(self) -> NDArray[np.float32]:
        """Return the number for each channel and value, [channels, 256]."""
        values = np.arange(256, dtype=np.float64)
        scaled = (values * self.rescale_factor if self.do_rescale else values).astype(np.float32)
        mean, std = (np.asarray(each, dtype=np.float32)[:, None] for each in (self.image_mean, self.image_std))
        if not self.do_normalize:
            return np.repeat(scaled[None], len(mean), axis=0)
        return np.asarray((scaled[None] - mean) / std, dtype=np.float32)


class PreparedMedia(NamedTuple):
    """One piece of media, ready for the tower: `patches` is [parts, patches of a part, values of a patch].

    The parts of an item are encoded independently of each other: frames of a split image, or points in time of a video.
    All of them have `grid` (height, width) patches. The values of a patch are ordered by channel first.
    """

    item: EncodedItem
    patches: Pixels
    grid: tuple[int, int]


def resize(pixels: Pixels, height: int, width: int, resample: int) -> Pixels:
    """Return pixels [y, x, colour] in another size."""
    image = Image.fromarray(pixels).resize((width, height), resample=Image.Resampling(resample))
    return np.asarray(image)


def cut_patches(frames: Pixels, patch: int, merge: int = 1, temporal: int = 1) -> Pixels:
    """Return the patches of `frames` [frame, y, x, colour], as [part, patch, value].

    `temporal` consecutive frames are one part. Patches come in rows; with `merge`, in squares of `merge` x `merge`.
    A value is at [colour, frame of the part, y, x].
    """
    frame_count, height, width, colours = frames.shape
    parts, down, across = frame_count // temporal, height // patch // merge, width // patch // merge
    inside = frames[:, : down * merge * patch, : across * merge * patch]
    cut = inside.reshape(parts, temporal, down, merge, patch, across, merge, patch, colours)
    ordered = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return ordered.reshape(parts, down * across * merge**2, colours * temporal * patch**2)
