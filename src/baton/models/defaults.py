"""How a model samples when a request does not say: its generation_config.json."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.errors import ConfigError
from baton.models.directory import one_or_more
from baton.protocol.requests import Share, Temperature, TokenId


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's generation_config.json says; what it does not say is OpenAI's default.

    `do_sample` is not read: with it absent or false the file still means its numbers for whoever samples, and a client
    that says nothing expects temperature 1.
    """

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0)] | None = None
    eos_token_id: TokenId | list[TokenId] | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return one_or_more(self.eos_token_id)


def read_defaults(directory: Path) -> SamplingDefaults:
    """Return what generation_config.json in `directory` says; a missing file says nothing. Raises ConfigError."""
    path = directory / "generation_config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=SamplingDefaults)
    except FileNotFoundError:
        return SamplingDefaults()
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
