"""Images in the echo engine: it generates the size of each image after the prompt."""

from collections.abc import Sequence

import msgspec

from baton.errors import InvalidRequest, Unsupported
from baton.ports.engine import Work
from baton.protocol.media import Media, MediaFile, MediaHandles


def with_image_sizes(work: Work) -> Work:
    """Return `work` with the sizes of its images at the end of the prompt. Raises InvalidRequest or Unsupported."""
    text = "".join(f"[{size}]" for item in work.media for size in _sizes(item))
    return msgspec.structs.replace(work, token_ids=(*work.token_ids, *text.encode()), media=())


def image_sizes(files: Sequence[MediaFile]) -> list[str]:
    """Return the size of each image. Raises InvalidRequest. Slow: call it off the event loop."""
    from baton.media.images import decode_image

    return [f"{image.width}x{image.height}" for image in map(decode_image, files)]


def _sizes(item: Media) -> list[str]:
    match item:
        case MediaFile():
            return image_sizes((item,))
        case MediaHandles():
            try:
                return msgspec.convert(item.params.get("sizes"), list[str])
            except msgspec.ValidationError as error:
                raise InvalidRequest(f"encoder_result.engine.sizes: {error}") from None
    raise Unsupported("media: the echo engine takes images only")
