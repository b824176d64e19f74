"""Images as Pillow reads them. Everything here takes its time: call it off the event loop."""

import io

from PIL import Image, ImageOps

from baton.errors import InvalidRequest
from baton.protocol.media import MediaFile

# Others are read by programs that Pillow starts, or by code that few have looked at.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


def check_image(file: MediaFile, max_pixels: int) -> None:
    """Raise InvalidRequest unless `file` begins like an image of at most `max_pixels`. Nothing is decoded."""
    width, height = _open(file).size
    if width * height > max_pixels:
        raise InvalidRequest(f"{file.place}: {width} x {height} pixels are more than the {max_pixels} of an image here")


def decode_image(file: MediaFile) -> Image.Image:
    """Return the image upright and in RGB; of a moving one the first picture. Raises InvalidRequest."""
    image = _open(file)
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:
        raise InvalidRequest(f"{file.place}: the image cannot be read: {_short(error)}") from error


def probe_image() -> MediaFile:
    """Return a small picture of our own, for probes."""
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
        raise InvalidRequest(f"{file.place}: it is not an image of a kind that is read ({kinds})") from error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
