"""The placeholders of a vision-language model, and the size of its embedding rows, from its directory."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import tokenizers

from baton.errors import ConfigError, InvalidRequest
from baton.models.tokenizer import HubTokenizer
from baton.ports.engine import MediaInfo, Placeholder
from baton.ports.transfer import EmbeddingShape

# Templates of some models render the token that begins an image, and not the one that stands for a row.
_TOKEN_FIELDS = {
    "image": ("image_token_id", "image_token_index", "boi_token_id", "boi_token_index"),
    "video": ("video_token_id", "video_token_index"),
}
_PREPROCESSING = ("config.json", "preprocessor_config.json", "processor_config.json")


def media_modalities(directory: Path) -> frozenset[str]:
    """Return the modalities of the model in `directory` beside text. Raises ConfigError."""
    config = _read(directory / "config.json")
    if not isinstance(config.get("vision_config"), dict):
        return frozenset()
    return frozenset({"image"} | {modality for modality in _TOKEN_FIELDS if any(_numbers(config, modality))})


def read_media_info(directory: Path, template_file: str = "") -> MediaInfo | None:
    """Return the rows and the placeholders of the model in `directory`; None if it takes text only.

    The placeholder of a modality is the token that the chat template renders once for an item. One that cannot be
    determined is left out. Raises ConfigError.
    """
    modalities = media_modalities(directory)
    if not modalities:
        return None
    tokenizer = HubTokenizer(directory, template_file)
    found = {modality: _placeholder(directory, tokenizer, modality) for modality in sorted(modalities)}
    placeholders = {modality: each for modality, each in found.items() if each is not None}
    return MediaInfo(shape=_shape(directory), placeholders=placeholders)


def _placeholder(directory: Path, tokenizer: HubTokenizer, modality: str) -> Placeholder | None:
    candidates = list(_candidates(directory, tokenizer, modality))
    rendered = _rendered(tokenizer, modality)
    if rendered is not None:
        candidates = [token for token in candidates if rendered.count(token) == 1]
    if not candidates:
        return None
    (text,) = tokenizer.token_names(candidates[:1])
    if text is None:
        raise ConfigError(f"config.json in {directory} has the placeholder {candidates[0]}, which is not a token")
    return Placeholder(token=candidates[0], text=text, as_text=_as_text(directory, text, candidates[0]))


def _candidates(directory: Path, tokenizer: HubTokenizer, modality: str) -> Iterator[int]:
    yield from _numbers(_read(directory / "config.json"), modality)
    settings = _read(directory / "tokenizer_config.json")
    for names in (settings, settings.get("extra_special_tokens")):
        text = names.get(f"{modality}_token") if isinstance(names, dict) else None
        tokens = tokenizer.encode(text) if isinstance(text, str) else []
        if len(tokens) == 1:
            yield tokens[0]


def _numbers(config: dict[str, object], modality: str) -> Iterator[int]:
    yield from (value for name in _TOKEN_FIELDS[modality] if isinstance(value := config.get(name), int))


def _rendered(tokenizer: HubTokenizer, modality: str) -> list[int] | None:
    """Return the tokens of a message with one item; None if the template renders nothing for it."""
    text: dict[str, object] = {"type": "text", "text": "."}
    try:
        with_item = tokenizer.render_chat([{"role": "user", "content": [{"type": modality}, text]}])
        without = tokenizer.render_chat([{"role": "user", "content": [text]}])
    except InvalidRequest:
        return None
    return tokenizer.encode(with_item) if with_item != without else None


def _as_text(directory: Path, text: str, token: int) -> tuple[int, ...]:
    """Return the tokens of `text` without the token of the whole text."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # special tokens are encoded as ordinary text
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    if token in tokens:  # it is in the vocabulary and not marked as special
        parts = (text[:1], text[1:])
        tokens = [each for part in parts for each in tokenizer.encode(part, add_special_tokens=False).ids]
    return tuple(tokens)


def _shape(directory: Path) -> EmbeddingShape:
    config = _read(directory / "config.json")
    nested, vision = config.get("text_config"), config.get("vision_config")
    text = {**config, **(nested if isinstance(nested, dict) else {})}
    size = text.get("hidden_size")
    if not isinstance(size, int):
        raise ConfigError(f"config.json in {directory} does not contain hidden_size")
    # Models with DeepStack add features of some layers of the encoder to each row.
    levels = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    return EmbeddingShape(
        model=_identity(directory),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or "bfloat16"),
        size=size * (1 + len(levels)) if isinstance(levels, list) else size,
    )


def _identity(directory: Path) -> str:
    """Return an identity of the encoder and its preprocessing, from their configuration."""
    digest = hashlib.blake2b(digest_size=16)
    for path in (directory / name for name in _PREPROCESSING):
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def _read(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        content: dict[str, object] = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return content
