"""Images, read with Pillow. All functions are slow: do not call them on the event loop."""

import io

from PIL import Image, ImageOps

from baton.errors import InvalidRequest
from baton.protocol.media import MediaFile

# Pillow reads other formats with external programs or with less tested code.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


def check_image(file: MediaFile, max_pixels: int) -> None:
    """Raise InvalidRequest unless the header of `file` is an image of at most `max_pixels`. Pixels are not decoded."""
    width, height = _open(file).size
    if width * height > max_pixels:
        raise InvalidRequest(f"{file.place}: {width} x {height} pixels exceed the limit of {max_pixels} for an image")


def decode_image(file: MediaFile) -> Image.Image:
    """Return the image in RGB, rotated by its EXIF data; of an animation the first frame. Raises InvalidRequest."""
    image = _open(file)
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:
        raise InvalidRequest(f"{file.place}: cannot read the image: {_short(error)}") from error


def probe_image() -> MediaFile:
    """Return a small generated image, for probes."""
    file = io.BytesIO()
    Image.linear_gradient("L").resize((64, 64)).convert("RGB").save(file, "PNG")
    return MediaFile(modality="image", data=file.getvalue())


def _open(file: MediaFile) -> Image.Image:
    try:
        return Image.open(io.BytesIO(file.data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidRequest(f"{file.place}: the image has too many pixels") from error
    except Exception as error:
        kinds = ", ".join(FORMATS)
        raise InvalidRequest(f"{file.place}: it is not an image in a supported format ({kinds})") from error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
