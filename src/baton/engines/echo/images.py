"""Images in the echo engine: to it an image is its size, which it says after the prompt."""

from collections.abc import Sequence

import msgspec

from baton.errors import InvalidRequest, Unsupported
from baton.ports.engine import Work
from baton.protocol.media import Media, MediaFile, MediaHandles


def with_pictures(work: Work) -> Work:
    """Return `work` with the sizes of its images at the end of the prompt. Raises InvalidRequest or Unsupported."""
    said = "".join(f"[{size}]" for item in work.media for size in _sizes(item))
    return msgspec.structs.replace(work, token_ids=(*work.token_ids, *said.encode()), media=())


def see(files: Sequence[MediaFile]) -> list[str]:
    """Return the size of each image. Raises InvalidRequest. Takes its time: call it off the event loop."""
    from baton.media.images import decode_image

    return [f"{image.width}x{image.height}" for image in map(decode_image, files)]


def _sizes(item: Media) -> list[str]:
    match item:
        case MediaFile():
            return see((item,))
        case MediaHandles():
            try:
                return msgspec.convert(item.params.get("sizes"), list[str])
            except msgspec.ValidationError as error:
                raise InvalidRequest(f"encoder_result.engine.sizes: {error}") from None
    raise Unsupported("media: the echo engine knows images only")
