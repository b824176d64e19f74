"""From a media file to patches: decoding, preprocessing and the content hash. Slow, and of any thread."""

import numpy as np

from baton.engine_kit.content_hash import rows_hash
from baton.engines.torch.vision.model import VideoLayout, VisionLayout
from baton.engines.torch.vision.pixels import PreparedMedia
from baton.errors import BatonError, EngineFailed, InvalidRequest, Unsupported
from baton.media.images import decode_image
from baton.media.video import VideoInfo, decode_video
from baton.protocol.media import MediaFile


def prepare(layout: VisionLayout, model: str, file: MediaFile) -> PreparedMedia:
    """Return `file` ready for the tower of the encoder `model`.

    Raises InvalidRequest for a file that cannot be read, Unsupported for a modality that the model does not take, and
    EngineFailed if the preprocessing fails.
    """
    try:
        return _prepare(layout, file, rows_hash(model, file.data, file.modality))
    except BatonError:
        raise
    except Exception as error:
        raise EngineFailed(f"{file.place}: preprocessing failed: {error!r}") from error


def _prepare(layout: VisionLayout, file: MediaFile, content_hash: str) -> PreparedMedia:
    match file.modality, layout:
        case "image", _:
            return _prepare_image(layout, file, content_hash)
        case "video", VideoLayout():
            return _prepare_video(layout, file, content_hash)
        case modality, _:
            raise Unsupported(f"{file.place}: this model does not take {modality}")


def _prepare_image(layout: VisionLayout, file: MediaFile, content_hash: str) -> PreparedMedia:
    pixels = np.asarray(decode_image(file))
    try:
        return layout.prepare_image(pixels, content_hash)
    except InvalidRequest as refusal:
        raise InvalidRequest(f"{file.place}: {refusal.message}") from None


def _prepare_video(layout: VideoLayout, file: MediaFile, content_hash: str) -> PreparedMedia:
    def sampling(info: VideoInfo) -> list[int]:
        return layout.sample_frames(info.frames, info.fps)

    video = decode_video(file, sampling)
    fps = len(video.indices) / video.info.frames * video.info.fps
    try:
        return layout.prepare_video(video.frames, video.timestamps, fps, content_hash)
    except InvalidRequest as refusal:
        raise InvalidRequest(f"{file.place}: {refusal.message}") from None
