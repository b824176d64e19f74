"""Where reasoning ends in the output of a model."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

END_OF_REASONING = "</think>"
REASONING_TAIL = 8  # tokens at the end of a prompt in which a template ends reasoning


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def ends_reasoning(prompt: Sequence[int], end_token: int | None) -> bool:
    """Return whether a prompt ends reasoning, as that of a template that disables it does."""
    return end_token in prompt[-REASONING_TAIL:]


def reasoning_end_token(directory: Path) -> int | None:
    """Return the token that ends reasoning; None if the model has none, or its tokenizer cannot be read."""
    try:
        file = msgspec.json.decode((directory / "tokenizer.json").read_bytes(), type=_TokenizerFile)
    except (OSError, msgspec.MsgspecError):
        return None
    return next((token.id for token in file.added_tokens if token.content == END_OF_REASONING), None)
