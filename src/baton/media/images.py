"""Images, read with Pillow. All functions are slow: engines call them with `decoding.run_decoding`.

`decode_image` converts as transformers does: rotated by EXIF data, then converted to RGB. Alpha is dropped: a
transparent pixel has the colour that is stored for it. Images of 16 bits are scaled to 8, where Pillow would cut off.
"""

import io

from PIL import Image, ImageOps

from baton.errors import InvalidRequest
from baton.protocol.media import MediaFile

# Pillow reads other formats with external programs or with less tested code.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
# Image processors scale to sizes in between; a longer strip would become nothing, or far larger than it is.
MAX_ASPECT_RATIO = 200
_EXIF_ORIENTATION = 0x0112
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")


def image_size(file: MediaFile) -> tuple[int, int]:
    """Return width and height of an image as it is shown, from its header; pixels are not decoded.

    Raises InvalidRequest unless it is an image within `file.limits`.
    """
    image = _open(file)
    _check_size(file, image)
    width, height = image.size
    return (height, width) if _is_turned(image) else (width, height)


def decode_image(file: MediaFile) -> Image.Image:
    """Return the image in RGB, rotated by its EXIF data; of an animation the first frame. Raises InvalidRequest."""
    image = _open(file)
    _check_size(file, image)
    _is_turned(image)  # Pillow keeps what it reads now: EXIF data behind the pixels do not contradict `image_size`
    try:
        image.load()
        return _to_rgb(_rotated(image))
    except Exception as error:
        raise InvalidRequest(f"{file.place}: cannot read the image: {_short(error)}") from error


def probe_image() -> MediaFile:
    """Return a small generated image, for probes."""
    file = io.BytesIO()
    Image.linear_gradient("L").resize((64, 64)).convert("RGB").save(file, "PNG")
    return MediaFile(modality="image", data=file.getvalue(), size=(64, 64))


def _check_size(file: MediaFile, image: Image.Image) -> None:
    width, height = image.size
    if width * height > file.limits.max_pixels:
        raise InvalidRequest(
            f"{file.place}: {width} x {height} pixels exceed the limit of {file.limits.max_pixels} for an image"
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidRequest(
            f"{file.place}: an image of {width} x {height} pixels is too narrow: one side may have"
            f" {MAX_ASPECT_RATIO} times the length of the other"
        )


def _is_turned(image: Image.Image) -> bool:
    """Return whether width and height are exchanged when the image is shown."""
    if image.format == "TIFF":
        return False  # Pillow has exchanged them
    try:
        # Of the base class: that of a PNG decodes the pixels.
        return Image.Image.getexif(image).get(_EXIF_ORIENTATION, 1) in (5, 6, 7, 8)
    except Exception:  # noqa: BLE001 - Pillow's parsers raise many types; damaged EXIF data rotate nothing
        return False


def _rotated(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # noqa: BLE001 - see `_is_turned`
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in _SIXTEEN_BITS:
        image = image.point(lambda value: value / 256, "L")
    elif image.mode in ("I", "F"):
        raise ValueError("images with more than 16 bits for a channel are not supported")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _open(file: MediaFile) -> Image.Image:
    try:
        return Image.open(io.BytesIO(file.data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidRequest(
            f"{file.place}: the pixels of the image exceed the limit of {file.limits.max_pixels} for an image"
        ) from error
    except Exception as error:
        kinds = ", ".join(FORMATS)
        raise InvalidRequest(f"{file.place}: it is not an image in a supported format ({kinds})") from error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
