"""The tokenizer, for workers that take text. Calls may be slow for long texts: run those off the event loop."""

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """The text of one growing answer."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these further tokens complete; a character in parts comes with its last part."""


class Tokenizer(Protocol):
    """Text to tokens and back, with the model's own chat template. Safe to use from several threads."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, with no special tokens added."""

    def decoder(self) -> Decoder:
        """Return a decoder for a new answer; special tokens are left out of its text."""

    def render_chat(self, messages: Sequence[dict[str, object]]) -> str:
        """Return the prompt for a chat. Raises InvalidRequest if the template refuses the messages."""


class TextEncoder(Protocol):
    """Text to tokens for models that embed. Safe to use from several threads."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, whole and with the special tokens that the model expects around it."""
