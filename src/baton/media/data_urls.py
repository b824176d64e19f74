"""data: URLs. Pure."""

import base64
import binascii
from urllib.parse import unquote_to_bytes

from baton.media.policy import Refused


def is_data_url(url: str) -> bool:
    """Return whether `url` contains its data."""
    return url[:5].lower() == "data:"


def media_type(url: str) -> str:
    """Return the media type of a data URL without parameters, in lower case."""
    return url[5:261].partition(",")[0].partition(";")[0].strip().lower()


def estimated_size(url: str) -> int:
    """Return how many bytes a data URL has, without decoding it: exactly in base64, else at most."""
    comma = url.find(",", 5)
    if comma < 0:
        return 0
    coded = len(url) - comma - 1
    return coded // 4 * 3 - url[-2:].count("=") if _is_base64(url, comma) else coded


def least_size(url: str) -> int:
    """Return how many bytes a data URL has at least, without decoding it."""
    return estimated_size(url) if _is_base64(url, url.find(",", 5)) else estimated_size(url) // 3


def read_data_url(url: str) -> bytes:
    """Return the content of a data URL. Slow if it is long. Raises Refused."""
    comma = url.find(",", 5)
    if comma < 0:
        raise Refused("the data URL has no data")
    body = url[comma + 1 :]
    if not _is_base64(url, comma):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise Refused("the data URL is not base64") from None


def _is_base64(url: str, comma: int) -> bool:
    return url[max(comma - 7, 5) : comma].lower() == ";base64"
