"""The sentence-transformers layout: which encoder a model has, and how its token vectors become one vector."""

import enum
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import ConfigError
from baton.models.directory import read_config

ENCODERS = frozenset({"albert", "bert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta"})
# These count positions from after the padding token's.
_OFFSET_POSITIONS = frozenset({"mpnet", "roberta", "xlm-roberta"})


class Pooling(enum.StrEnum):
    """How the vectors of the tokens become one; several are joined end to end, in this order."""

    CLS = "cls_token"
    MAX = "max_tokens"
    MEAN = "mean_tokens"
    MEAN_SQRT_LEN = "mean_sqrt_len_tokens"
    WEIGHTED_MEAN = "weightedmean_tokens"
    LAST = "lasttoken"


_SHORT = {"cls": Pooling.CLS, "max": Pooling.MAX, "mean": Pooling.MEAN, "lasttoken": Pooling.LAST}


class SentenceLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What a sentence model's files say."""

    vocabulary: int
    max_tokens: int
    poolings: tuple[Pooling, ...] = (Pooling.MEAN,)
    normalize: bool = False
    lowercase: bool = False


class _Module(msgspec.Struct, frozen=True):
    type: str
    path: str = ""


class _SentenceConfig(msgspec.Struct, frozen=True):
    max_seq_length: int | None = None
    do_lower_case: bool = False


def is_sentence_model(directory: Path) -> bool:
    """Whether the model in `directory` embeds, and does not generate. Raises ConfigError."""
    return (directory / "modules.json").is_file() or read_config(directory).model_type in ENCODERS


def read_layout(directory: Path) -> SentenceLayout:
    """Return how the model in `directory` embeds. Raises ConfigError, naming what is not supported.

    An encoder without the files of sentence-transformers is pooled by mean, as sentence-transformers itself does.
    """
    config = read_config(directory)
    if config.model_type not in ENCODERS:
        known = ", ".join(sorted(ENCODERS))
        raise ConfigError(
            f"cannot embed with the architecture {config.model_type!r} of {directory}; only with: {known}"
        )
    positions = config.max_position_embeddings or 512
    if config.model_type in _OFFSET_POSITIONS:
        positions -= 2
    sentence = _read(directory / "sentence_bert_config.json", _SentenceConfig) or _SentenceConfig()
    layout = SentenceLayout(
        vocabulary=config.vocab_size,
        max_tokens=min(sentence.max_seq_length or positions, positions),
        lowercase=sentence.do_lower_case,
    )
    for module in _read(directory / "modules.json", list[_Module]) or []:
        match module.type.rpartition(".")[2]:
            case "Transformer":
                continue
            case "Pooling":
                layout = msgspec.structs.replace(layout, poolings=_poolings(directory / module.path / "config.json"))
            case "Normalize":
                layout = msgspec.structs.replace(layout, normalize=True)
            case _:
                raise ConfigError(f"cannot embed with the module {module.type!r} of {directory / 'modules.json'}")
    return layout


def _poolings(path: Path) -> tuple[Pooling, ...]:
    config = _read(path, dict[str, Any])
    if config is None:
        raise ConfigError(f"{path} is missing")
    named = config.get("pooling_mode")
    wanted = [_SHORT.get(named, named)] if isinstance(named, str) else []
    prefix = "pooling_mode_"
    wanted += [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True]
    for name in wanted:
        if name not in set(Pooling):
            raise ConfigError(f"cannot pool by {name!r}, as {path} asks; only by: {', '.join(Pooling)}")
    if not wanted:
        raise ConfigError(f"{path} names no pooling mode")
    return tuple(pooling for pooling in Pooling if pooling in wanted)


def _read(path: Path, kind: Any) -> Any:
    """Return the content of a JSON file, or None if it is not there. Raises ConfigError if it is not a `kind`."""
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
