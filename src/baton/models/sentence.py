"""The sentence-transformers layout: the encoder of a model, and how its token vectors are pooled into one vector."""

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import ConfigError
from baton.models.directory import read_config

ENCODERS = frozenset({"albert", "bert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta"})
# Positions of these models start after that of the padding token.
_OFFSET_POSITIONS = frozenset({"mpnet", "roberta", "xlm-roberta"})


class Pooling(enum.StrEnum):
    """How the token vectors become one vector. Several results are concatenated in this order."""

    CLS = "cls_token"
    MAX = "max_tokens"
    MEAN = "mean_tokens"
    MEAN_SQRT_LEN = "mean_sqrt_len_tokens"
    WEIGHTED_MEAN = "weightedmean_tokens"
    LAST = "lasttoken"


_SHORT = {"cls": Pooling.CLS, "max": Pooling.MAX, "mean": Pooling.MEAN, "lasttoken": Pooling.LAST}


class SentenceLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a sentence model."""

    vocabulary: int
    max_tokens: int
    poolings: tuple[Pooling, ...] = (Pooling.MEAN,)
    normalize: bool = False
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()


class _Module(msgspec.Struct, frozen=True):
    type: str
    path: str = ""


class _SentenceConfig(msgspec.Struct, frozen=True):
    max_seq_length: int | None = None
    do_lower_case: bool = False


def is_sentence_model(directory: Path) -> bool:
    """Return whether the model in `directory` embeds instead of generating. Raises ConfigError."""
    return (directory / "modules.json").is_file() or read_config(directory).model_type in ENCODERS


def read_layout(directory: Path) -> SentenceLayout:
    """Return how the model in `directory` embeds. Raises ConfigError, naming an unsupported architecture or module.

    An encoder without the files of sentence-transformers is pooled by mean, as sentence-transformers does.
    """
    config = read_config(directory)
    if config.model_type not in ENCODERS:
        supported = ", ".join(sorted(ENCODERS))
        raise ConfigError(f"the architecture {config.model_type!r} of {directory} cannot embed; supported: {supported}")
    positions = config.max_position_embeddings or 512
    if config.model_type in _OFFSET_POSITIONS:
        positions -= 2
    sentence = _read_sentence_config(directory)
    poolings, normalize = _read_modules(directory)
    return SentenceLayout(
        vocabulary=config.vocab_size,
        max_tokens=min(sentence.max_seq_length or positions, positions),
        poolings=poolings,
        normalize=normalize,
        is_matryoshka=bool(config.is_matryoshka),
        matryoshka_dimensions=tuple(config.matryoshka_dimensions or ()),
    )


def is_lowercase(directory: Path) -> bool:
    """Return whether the model in `directory` embeds texts in lower case only. Raises ConfigError."""
    return _read_sentence_config(directory).do_lower_case


def shorter_sizes(listed: Sequence[int], is_matryoshka: bool, size: int) -> tuple[int, ...]:
    """Return the sizes that vectors of `size` numbers can be shortened to: those listed, else all if it was trained."""
    if listed:
        return tuple(sorted(shorter for shorter in set(listed) if 1 <= shorter < size))
    return tuple(range(1, size)) if is_matryoshka else ()


def _read_sentence_config(directory: Path) -> _SentenceConfig:
    read: _SentenceConfig | None = _read(directory / "sentence_bert_config.json", _SentenceConfig)
    return read or _SentenceConfig()


def _read_modules(directory: Path) -> tuple[tuple[Pooling, ...], bool]:
    """Return the poolings, and whether the vector is normalized afterwards."""
    poolings: tuple[Pooling, ...] = (Pooling.MEAN,)
    normalize = False
    path = directory / "modules.json"
    for module in _read(path, list[_Module]) or []:
        match module.type.rpartition(".")[2]:
            case "Transformer":
                continue
            case "Pooling":
                poolings = _read_poolings(directory / module.path / "config.json")
            case "Normalize":
                normalize = True
            case _:
                raise ConfigError(f"the module {module.type!r} in {path} is not supported")
    return poolings, normalize


def _read_poolings(path: Path) -> tuple[Pooling, ...]:
    config = _read(path, dict[str, Any])
    if config is None:
        raise ConfigError(f"{path} is missing")
    modes = _pooling_modes(config)
    if not modes:
        raise ConfigError(f"{path} has no pooling mode")
    for mode in modes:
        if mode not in set(Pooling):
            raise ConfigError(f"the pooling mode {mode!r} in {path} is not supported; supported: {', '.join(Pooling)}")
    return tuple(pooling for pooling in Pooling if pooling in modes)


def _pooling_modes(config: dict[str, Any]) -> list[str]:
    """Return the modes of a pooling module: one short name, flags named `pooling_mode_...`, or both."""
    prefix = "pooling_mode_"
    modes = [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True]
    short = config.get("pooling_mode")
    return [_SHORT.get(short, short), *modes] if isinstance(short, str) else modes


def _read(path: Path, kind: Any) -> Any:
    """Return the content of a JSON file, None if it does not exist. Raises ConfigError if it is not a `kind`."""
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
