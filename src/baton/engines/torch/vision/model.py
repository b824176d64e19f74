"""The vision part of a model directory: its layout, and what language workers must know of it. Knows no torch.

A worker that only computes prompts reads this too: it takes rows only of an encoder with the same identity.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import tokenizers

from baton.engines.torch.models.vision_language import LAYOUTS
from baton.engines.torch.vision.files import VisionFiles, read_vision_files
from baton.engines.torch.vision.idefics3 import Idefics3Layout
from baton.engines.torch.vision.identity import identify_tower
from baton.engines.torch.vision.pixels import Colours, Pixels, PreparedMedia
from baton.engines.torch.vision.qwen import QwenLayout
from baton.errors import ConfigError
from baton.ports.engine import MediaInfo, Placeholder
from baton.ports.transfer import EmbeddingShape

# The computation from a file to rows. Increment when the same file gets other rows.
_VERSION = 1


class VisionLayout(Protocol):
    """The preprocessing of one layout of models. Its methods are slow, keep nothing, and run on any thread."""

    @property
    def size(self) -> int:
        """How many numbers a row has."""

    @property
    def colours(self) -> Colours:
        """How the tower gets colours."""

    @property
    def placeholders(self) -> Mapping[str, int]:
        """The token that stands for an item in a prompt, for each modality that the model takes."""

    @property
    def around_rows(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The tokens that a prompt has before and after the rows of an item, besides those of the chat template."""

    def identity(self) -> object:
        """Return everything that decides on rows, but the weights; it can be written as JSON."""

    def prepare_image(self, pixels: Pixels, content_hash: str) -> PreparedMedia:
        """Return an image [y, x, colour], ready for the tower. Raises InvalidRequest for one that it cannot take."""


@runtime_checkable
class VideoLayout(VisionLayout, Protocol):
    """A layout of models that take video."""

    def sample_frames(self, frames: int, fps: float) -> list[int]:
        """Return the numbers of the frames that the model gets, of a video of so many frames, `fps` in a second."""

    def prepare_video(
        self, frames: Pixels, timestamps: Sequence[float], fps: float, content_hash: str
    ) -> PreparedMedia:
        """Return a video, ready for the tower: `frames` [frame, y, x, colour] at `timestamps`, `fps` in a second.

        Raises InvalidRequest for one that the tower cannot take.
        """


def read_layout(directory: Path) -> Idefics3Layout | QwenLayout:
    """Return the layout of the model in `directory`. Raises ConfigError for one that is not supported."""
    files = read_vision_files(directory)
    match _architecture(files):
        case "Qwen2_5_VLForConditionalGeneration":
            return QwenLayout(files)
        case "Idefics3ForConditionalGeneration" | "SmolVLMForConditionalGeneration":
            return Idefics3Layout(files, read_tokenizer(directory))
        case other:
            raise ConfigError(
                f"{other} has no vision tower that the built-in engine supports; it supports {', '.join(LAYOUTS)}"
            )


def read_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of the model in `directory`. Raises ConfigError."""
    try:
        return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"cannot read the tokenizer in {directory}: {error}") from error


def vision_identity(directory: Path) -> str:
    """Return the identity of the encoder in `directory`: tower, connector and preprocessing.

    It is the same on every host, and for every sharding of the same weights. Only samples of the weights are read.
    Raises ConfigError.
    """
    return identify_tower(directory, _VERSION, read_layout(directory).identity())


def media_info(directory: Path, layout: VisionLayout, dtype: str) -> MediaInfo:
    """Return the rows, of type `dtype`, and the placeholders of the model in `directory`. Raises ConfigError."""
    tokenizer = read_tokenizer(directory)
    model = identify_tower(directory, _VERSION, layout.identity())
    return MediaInfo(
        shape=EmbeddingShape(model=model, dtype=dtype, size=layout.size),
        placeholders={
            modality: _placeholder(tokenizer, token, directory, *layout.around_rows)
            for modality, token in layout.placeholders.items()
        },
    )


def _architecture(files: VisionFiles) -> str:
    match files.config.get("architectures"):
        case [str(architecture), *_]:
            return architecture
        case _:
            return str(files.config.get("model_type", "unknown"))


def _placeholder(
    tokenizer: tokenizers.Tokenizer, token: int, directory: Path, before: Sequence[str], after: Sequence[str]
) -> Placeholder:
    text = tokenizer.id_to_token(token)
    if text is None:
        raise ConfigError(f"the tokenizer in {directory} has no token {token}, the placeholder of an item of media")
    return Placeholder(
        token=token,
        text=text,
        as_text=_plain_tokens(tokenizer, token, text),
        before=_tokens(tokenizer, before),
        after=_tokens(tokenizer, after),
    )


def _tokens(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> tuple[int, ...]:
    return tuple(token for text in texts if (token := tokenizer.token_to_id(text)) is not None)


def _plain_tokens(tokenizer: tokenizers.Tokenizer, token: int, text: str) -> tuple[int, ...]:
    """Return the tokens of a placeholder's text where it is only text. `tokenizer` is used for nothing else."""
    tokenizer.encode_special_tokens = True
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    if token in plain:  # it is an added token, but not a special one: neither of two parts of it is
        parts = tokenizer.encode_batch_fast([text[:1], text[1:]], add_special_tokens=False)
        plain = [token for part in parts for token in part.ids]
    return tuple(plain)
