"""The small files of a vision-language model that its tower and its preprocessing are configured in. Knows no torch."""

from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from baton.errors import ConfigError

Fields = dict[str, object]
T = TypeVar("T")


class VisionFiles(NamedTuple):
    """The contents of config.json, and of the processors of images and video, of the model in `directory`."""

    directory: Path
    config: Fields
    processor: Fields
    images: Fields
    video: Fields

    def convert(self, fields: object, kind: type[T], what: str) -> T:
        """Return `fields` as `kind`; unknown fields are ignored. Raises ConfigError naming `what`."""
        try:
            return msgspec.convert(fields, kind)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.directory}: {what}: {error}") from None


def read_vision_files(directory: Path) -> VisionFiles:
    """Return the files of the model in `directory`. Raises ConfigError.

    Newer models have the settings of all processors in processor_config.json, older ones in a file for each.
    """
    processor = _read(directory / "processor_config.json")
    images = _nested(processor, "image_processor") or _read(directory / "preprocessor_config.json")
    video = _nested(processor, "video_processor") or _read(directory / "video_preprocessor_config.json") or images
    return VisionFiles(directory, _read(directory / "config.json"), processor, images, video)


def _read(path: Path) -> Fields:
    """Return the object in a file; it is empty if there is no file."""
    try:
        fields: Fields = msgspec.json.decode(path.read_bytes(), type=Fields)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return fields


def _nested(fields: Fields, name: str) -> Fields:
    nested = fields.get(name)
    return nested if isinstance(nested, dict) else {}
