"""Model directories in the Hugging Face layout: their location and configuration."""

from pathlib import Path

import msgspec
import tokenizers

from baton.errors import ConfigError
from baton.models.demo import DEMOS, prepare_demo
from baton.models.hub import fetch_from_hub, is_hub_id


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a model's config.json that engines need.

    A model that was trained for shorter vectors `is_matryoshka`; it may list the `matryoshka_dimensions` of those.
    """

    vocab_size: int
    model_type: str = ""
    max_position_embeddings: int | None = None
    eos_token_id: int | list[int] | None = None
    is_matryoshka: bool | None = None
    matryoshka_dimensions: list[int] | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a generation."""
        return one_or_more(self.eos_token_id)


def one_or_more(tokens: int | list[int] | None) -> tuple[int, ...]:
    """Return a field that holds no token, one token or a list, as a tuple."""
    match tokens:
        case None:
            return ()
        case int(token):
            return (token,)
        case several:
            return tuple(several)


def resolve_model(model: str, cache_dir: Path, weights: bool = True) -> Path:
    """Return the directory of `model`: a demo model, a directory, or a model of the Hugging Face hub, in this order.

    Fetches missing files and blocks, possibly for minutes. Without `weights`, only the small files of a hub model are
    fetched. Raises ConfigError with what to do.
    """
    if model in DEMOS:
        return prepare_demo(DEMOS[model], cache_dir)
    directory = Path(model).expanduser()
    if not directory.is_dir() and is_hub_id(model):
        directory = fetch_from_hub(model, weights)
    elif not directory.is_dir():
        raise ConfigError(
            f"model directory {model!r} does not exist; give the path of a model directory, a Hugging Face id "
            f"(owner/name), or one of: {', '.join(DEMOS)}"
        )
    _check(directory, model)
    return directory.resolve()


def served_name(model: str) -> str:
    """Return the default name under which `model` is served."""
    directory = Path(model).expanduser()
    return model if model in DEMOS or not directory.is_dir() else directory.resolve().name


def read_config(directory: Path) -> ModelConfig:
    """Return the configuration of the model in `directory`. Raises ConfigError."""
    path = directory / "config.json"
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        # Multimodal models configure their language model in a nested object.
        text_config = content.get("text_config")
        if isinstance(text_config, dict):
            content = {**text_config, **{name: value for name, value in content.items() if value is not None}}
        return msgspec.convert(content, ModelConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _check(directory: Path, model: str) -> None:
    """Raise ConfigError for a missing or broken file that every engine reads, before any process starts."""
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise ConfigError(f"model directory {model!r} has no {name}")
    read_config(directory)
    try:
        tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain Exception; the frontend would wait forever for a broken file
        raise ConfigError(f"cannot read {directory / 'tokenizer.json'}: {error}") from error
