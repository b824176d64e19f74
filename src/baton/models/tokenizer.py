"""The tokenizer of a model directory, with Hugging Face's tokenizers, and its chat template."""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from baton.errors import ConfigError, InvalidRequest, Unsupported
from baton.models.chat_template import load_chat_template
from baton.models.sentence import is_lowercase


class HubTokenizer:
    """A Tokenizer (see `ports/tokenizer.py`), with the chat template in `template_file`, or the model's own."""

    def __init__(self, directory: Path, template_file: str = "") -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigError(f"cannot read the tokenizer in {directory}: {error}") from error
        self._template = load_chat_template(directory, template_file)

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        # Unlike `encode`, this releases the GIL, so the event loop is not blocked.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a whole prompt, including special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def encode_with(self, text: str, special_tokens: bool) -> list[int]:
        """Return the tokens of `text`, with those that the tokenizer adds around a text if `special_tokens`."""
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
        return encoding.ids

    def token_names(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return the entries of the vocabulary for these tokens, None for a token that it does not have."""
        return [self._tokenizer.id_to_token(token) for token in token_ids]

    def unknown(self, token_ids: Sequence[int]) -> int | None:
        """Return the index of the first token that the vocabulary does not have, None if it has all."""
        size = self._tokenizer.get_vocab_size()
        return next((index for index, token in enumerate(token_ids) if token >= size), None)

    def decoder(self) -> "HubDecoder":
        """See `Tokenizer.decoder`."""
        return HubDecoder(self._tokenizer)

    def render_chat(self, messages: Sequence[dict[str, object]], variables: Mapping[str, object] | None = None) -> str:
        """See `Tokenizer.render_chat`."""
        if self._template is None:
            raise InvalidRequest("messages: this model has no chat template; use /v1/completions")
        return self._template.render(messages, variables)


class HubTokenTexts:
    """A TokenTexts (see `ports/tokenizer.py`) that reads the tokenizer of `directory` when it is first used."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._texts: dict[int, str] = {}

    @functools.cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        try:
            return tokenizers.Tokenizer.from_file(str(self._directory / "tokenizer.json"))
        except Exception as error:  # tokenizers raises plain Exception
            raise Unsupported(f"this model has no tokenizer that can decode a prompt: {error}") from error

    @functools.cached_property
    def _before(self) -> tuple[list[int], str]:
        """A token before the one to decode, and its text: some tokenizers drop the space at the start of a text."""
        tokens = self.encode("a")[-1:]
        return tokens, self._tokenizer.decode(tokens, skip_special_tokens=False)

    def text_of(self, token_id: int) -> str:
        """See `TokenTexts.text_of`."""
        text = self._texts.get(token_id)
        if text is None:
            tokens, before = self._before
            text = self._tokenizer.decode([*tokens, token_id], skip_special_tokens=False).removeprefix(before)
            self._texts[token_id] = text
        return text

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def is_special(self, token_id: int) -> bool:
        """See `TokenTexts.is_special`."""
        return token_id in self._special

    def decode(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """See `TokenTexts.decode`."""
        tokenizer, stream = self._tokenizer, DecodeStream(skip_special_tokens=False)
        offsets: list[int] = []
        length = 0
        for token in token_ids:
            offsets.append(length)
            length += len(stream.step(tokenizer, token) or "")
        return tokenizer.decode(list(token_ids), skip_special_tokens=False), offsets

    def encode(self, text: str) -> list[int]:
        """See `TokenTexts.encode`."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids


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
        self._before: list[int] = []  # the last token that completed a text
        self._held: list[int] = []  # the tokens after it

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Decoder.push`."""
        texts = [self._step(token) for token in token_ids]
        return "".join(texts)

    def _step(self, token: int) -> str:
        text = self._stream.step(self._tokenizer, token) or ""
        if text:
            self._before, self._held = [token], []
        else:
            self._held.append(token)
        return text

    def flush(self) -> str:
        """See `Decoder.flush`."""
        decode = self._tokenizer.decode
        before = decode(self._before, skip_special_tokens=True)
        rest = decode(self._before + self._held, skip_special_tokens=True).removeprefix(before)
        return rest if rest.endswith("\ufffd") else ""  # the stream has decided on all other tokens
