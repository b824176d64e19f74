"""Model directories in the Hugging Face layout: where one is, and what its configuration says."""

from pathlib import Path

import msgspec
import tokenizers

from baton.errors import ConfigError


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a model's config.json that every engine needs."""

    vocab_size: int
    max_position_embeddings: int | None = None
    eos_token_id: int | list[int] | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        match self.eos_token_id:
            case None:
                return ()
            case int(token):
                return (token,)
            case tokens:
                return tuple(tokens)


def resolve_model(model: str) -> Path:
    """Return the directory of `model`. Raises ConfigError, saying what to do, if it is not one."""
    directory = Path(model).expanduser()
    if not directory.is_dir():
        raise ConfigError(f"model directory {model!r} does not exist; give the path of a Hugging Face model directory")
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise ConfigError(f"model directory {model!r} has no {name}")
    read_config(directory)
    try:
        tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain Exception; unread, the frontend would wait for it in vain
        raise ConfigError(f"cannot read {directory / 'tokenizer.json'}: {error}") from error
    return directory.resolve()


def read_config(directory: Path) -> ModelConfig:
    """Return the configuration of the model in `directory`. Raises ConfigError."""
    path = directory / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=ModelConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
