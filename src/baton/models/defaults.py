"""Default sampling parameters of a model, from its generation_config.json."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.errors import ConfigError
from baton.models.directory import one_or_more
from baton.protocol.requests import Share, Temperature, TokenId


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters for requests that do not set them. None is OpenAI's default.

    `do_sample` is ignored: the other parameters apply even if it is absent or false, and a client that does not set a
    temperature expects 1.
    """

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0)] | None = None
    eos_token_id: TokenId | list[TokenId] | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a generation."""
        return one_or_more(self.eos_token_id)


def read_defaults(directory: Path) -> SamplingDefaults:
    """Return the defaults in `directory`; all None if there is no generation_config.json. Raises ConfigError."""
    path = directory / "generation_config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=SamplingDefaults)
    except FileNotFoundError:
        return SamplingDefaults()
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
