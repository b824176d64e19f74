"""The tokenizer of a model directory, with Hugging Face's tokenizers, and its chat template in a sandbox."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers.decoders import DecodeStream

from baton.errors import ConfigError, InvalidRequest
from baton.models.sentence import is_lowercase

log = logging.getLogger(__name__)


class HubTokenizer:
    """A Tokenizer (see `ports/tokenizer.py`)."""

    def __init__(self, directory: Path) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
            self._settings = json.loads((directory / "tokenizer_config.json").read_text())
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigError(f"cannot read the tokenizer in {directory}: {error}") from error
        self._template = _read_template(self._settings, directory)

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

    def render_chat(self, messages: Sequence[dict[str, object]]) -> str:
        """See `Tokenizer.render_chat`."""
        if self._template is None:
            raise InvalidRequest("messages: this model has no chat template; use /v1/completions")
        special = {key: value for key, value in self._settings.items() if key.endswith("_token")}
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **special)
        except Exception as error:  # a template may raise anything for messages that it does not expect
            raise InvalidRequest(f"messages: {error}") from error


class PassageTokenizer:
    """A TextEncoder (see `ports/tokenizer.py`)."""

    def __init__(self, directory: Path) -> None:
        self._lowercase = is_lowercase(directory)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigError(f"cannot read the tokenizer in {directory}: {error}") from error
        self._first = self._added(directory, "bos")
        self._last = self._added(directory, "eos")
        self._tokenizer.no_truncation()  # the caller refuses a text that is too long; it is never truncated silently
        self._tokenizer.no_padding()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See `TextEncoder.encode_batch`."""
        batch = [text.lower() for text in texts] if self._lowercase else list(texts)
        return [self._complete(encoding.ids) for encoding in self._tokenizer.encode_batch_fast(batch)]

    def _complete(self, token_ids: list[int]) -> list[int]:
        """Return the tokens with those that the model's settings add and its tokenizer.json does not."""
        first = self._first if token_ids[:1] != self._first else []
        last = self._last if token_ids[-1:] != self._last else []
        return [*first, *token_ids, *last]

    def _added(self, directory: Path, kind: str) -> list[int]:
        """Return the token that `add_bos_token` or `add_eos_token` in tokenizer_config.json adds, if it does."""
        path = directory / "tokenizer_config.json"
        try:
            settings = json.loads(path.read_text()) if path.is_file() else {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        token = settings.get(f"{kind}_token") if settings.get(f"add_{kind}_token") else None
        content = token.get("content") if isinstance(token, dict) else token
        number = self._tokenizer.token_to_id(content) if isinstance(content, str) else None
        return [] if number is None else [number]


class HubDecoder:
    """A Decoder (see `ports/tokenizer.py`)."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Decoder.push`."""
        step, tokenizer = self._stream.step, self._tokenizer
        return "".join([step(tokenizer, token) or "" for token in token_ids])


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _read_template(settings: dict[str, object], directory: Path) -> jinja2.Template | None:
    """Return the compiled chat template, or None if the model has none. Raises ConfigError if it cannot be read."""
    path = directory / "chat_template.jinja"
    try:
        source = settings.get("chat_template") or (path.read_text() if path.is_file() else None)
        if not isinstance(source, str):
            if source is not None:
                log.warning(
                    "ignoring the chat template in %s: it is a %s, not a string", directory, type(source).__name__
                )
            return None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        return environment.from_string(source)
    except (OSError, UnicodeError, jinja2.TemplateError) as error:
        raise ConfigError(f"cannot read the chat template in {directory}: {error}") from error
