"""The tokenizer of a model directory, with Hugging Face's tokenizers, and its chat template."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from baton.errors import ConfigError, InvalidRequest
from baton.models.chat_template import compile_template, read_chat_template, read_template_file
from baton.models.sentence import read_layout


class HubTokenizer:
    """A Tokenizer (see `ports/tokenizer.py`), with the chat template in `template_file`, or the model's own."""

    def __init__(self, directory: Path, template_file: str = "") -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
            self._settings = json.loads((directory / "tokenizer_config.json").read_text())
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigError(f"cannot read the tokenizer in {directory}: {error}") from error
        source = read_template_file(Path(template_file)) if template_file else read_chat_template(directory)
        self._template = compile_template(source, directory) if source is not None else None

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        # Unlike `encode`, this releases the GIL, so the event loop is not blocked.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a whole prompt, including special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def decoder(self) -> "HubDecoder":
        """See `Tokenizer.decoder`."""
        return HubDecoder(self._tokenizer)

    def render_chat(self, messages: Sequence[dict[str, object]], variables: Mapping[str, object] | None = None) -> str:
        """See `Tokenizer.render_chat`."""
        if self._template is None:
            raise InvalidRequest("messages: this model has no chat template; use /v1/completions")
        special = {key: value for key, value in self._settings.items() if key.endswith("_token")}
        values = {**special, "add_generation_prompt": True, **(variables or {}), "messages": messages}
        try:
            return self._template.render(values)
        except Exception as error:  # a template may raise anything for messages that it does not expect
            raise InvalidRequest(f"messages: {error}") from error


class PassageTokenizer:
    """A TextEncoder (see `ports/tokenizer.py`)."""

    def __init__(self, directory: Path) -> None:
        self._lowercase = read_layout(directory).lowercase
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigError(f"cannot read the tokenizer in {directory}: {error}") from error
        self._tokenizer.no_truncation()  # the caller refuses a text that is too long; it is never truncated silently
        self._tokenizer.no_padding()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See `TextEncoder.encode_batch`."""
        batch = [text.lower() for text in texts] if self._lowercase else list(texts)
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(batch)]


class HubDecoder:
    """A Decoder (see `ports/tokenizer.py`)."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Decoder.push`."""
        step, tokenizer = self._stream.step, self._tokenizer
        return "".join([step(tokenizer, token) or "" for token in token_ids])
