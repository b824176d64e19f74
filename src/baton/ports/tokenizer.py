"""The tokenizer of a model. Calls are slow for long texts: run them off the event loop."""

from collections.abc import Mapping, Sequence
from typing import Protocol


class Decoder(Protocol):
    """Decodes the tokens of one answer, as they are generated."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; a character of several tokens is returned with its last one."""

    def flush(self) -> str:
        """Return the rest at the end of the answer: U+FFFD for a character that is not complete. Called once."""


class TokenTexts(Protocol):
    """The texts of tokens, for workers that receive tokens. Safe to use from several threads.

    Every method raises Unsupported if the model has no tokenizer that Baton can read.
    """

    def text_of(self, token_id: int) -> str:
        """Return the text of a token within a text; U+FFFD for a part of a character."""

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of the text of an answer."""

    def decode(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text of these tokens, special tokens included, and where in it each of them begins."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, with no special tokens added."""


class Tokenizer(Protocol):
    """Text to tokens and back, with the model's chat template. Safe to use from several threads."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, with no special tokens added."""

    def decoder(self) -> Decoder:
        """Return a decoder for a new answer; special tokens are left out of its text."""

    def render_chat(self, messages: Sequence[dict[str, object]], variables: Mapping[str, object] | None = None) -> str:
        """Return the prompt for a chat; `variables` are the client's own for the template.

        Raises InvalidRequest if the template cannot render the messages.
        """


class TextEncoder(Protocol):
    """Text to tokens for embedding models. Safe to use from several threads."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, not truncated, with the special tokens that the model expects."""
