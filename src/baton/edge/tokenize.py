"""`/tokenize` and `/detokenize`, with vLLM's requests and answers, and Anthropic's `/v1/messages/count_tokens`.

The tokenizer and the chat template are the files of the model that the frontend uses too.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from baton.edge.anthropic_chat import CountTokensRequest, as_chat
from baton.edge.errors import FieldError
from baton.edge.fields.types import TokenId
from baton.edge.fields.wording import field_error
from baton.edge.messages import Answer, Request
from baton.edge.routes import Frontend, Json
from baton.edge.served_models import ServedModels
from baton.models.tokenizer import HubTokenizer
from baton.ports.runtime import ModelCard

THREADS = 2
"""Further requests wait for one; those whose clients leave are not started."""

T = TypeVar("T")
Kind = TypeVar("Kind", bound=msgspec.Struct)


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A prompt, or the messages of a chat. Like `/v1/completions`, no special tokens are added unless asked for."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, object] | None = None
    tools: list[dict[str, object]] | None = None


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """The tokens, with their entries in the vocabulary if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Tokens."""

    model: str | None = None
    tokens: list[TokenId]


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """Their text, with special tokens."""

    prompt: str


class TokenCount(msgspec.Struct, kw_only=True):
    """How many tokens a request to `/v1/messages` has."""

    input_tokens: int


class TokenizeRoutes:
    """Loads the tokenizer of a model when it is first needed, and keeps it."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._tokenizers: dict[tuple[str, str | None], HubTokenizer] = {}
        self._threads = ThreadPoolExecutor(THREADS, "tokenize")

    async def tokenize(self, request: Request, frontend: Frontend) -> Answer:
        """Answer `/tokenize`."""
        asked = _decode(request.body, TokenizeRequest)
        card = self._models.card(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise FieldError("prompt", "Give either 'prompt' or 'messages'.", code="invalid_value")

        def work(tokenizer: HubTokenizer) -> TokenizeAnswer:
            text = asked.prompt if asked.prompt is not None else _rendered(tokenizer, asked)
            tokens = tokenizer.encode_with(text, asked.add_special_tokens)
            names = tokenizer.token_names(tokens) if asked.return_token_strs else None
            return TokenizeAnswer(count=len(tokens), max_model_len=card.context_length, tokens=tokens, token_strs=names)

        return _answer(await self._run(card, work))

    async def detokenize(self, request: Request, frontend: Frontend) -> Answer:
        """Answer `/detokenize`."""
        asked = _decode(request.body, DetokenizeRequest)
        card = self._models.card(asked.model)

        def work(tokenizer: HubTokenizer) -> DetokenizeAnswer:
            if (unknown := tokenizer.unknown(asked.tokens)) is not None:
                message = f"Token {asked.tokens[unknown]} is not in the vocabulary of the model {card.name!r}."
                raise FieldError(f"tokens[{unknown}]", message, code="invalid_value")
            return DetokenizeAnswer(prompt=tokenizer.decode(asked.tokens))

        return _answer(await self._run(card, work))

    async def count_tokens(self, request: Request, frontend: Frontend) -> Answer:
        """Answer `/v1/messages/count_tokens`."""
        asked = _decode(request.body, CountTokensRequest)
        chat = TokenizeRequest(messages=as_chat(asked), tools=asked.functions())
        card = self._models.card(asked.model)

        def work(tokenizer: HubTokenizer) -> TokenCount:
            return TokenCount(input_tokens=len(tokenizer.encode(_rendered(tokenizer, chat))))

        return _answer(await self._run(card, work))

    async def _run(self, card: ModelCard, work: Callable[[HubTokenizer], T]) -> T:
        """Run `work` off the event loop, with the tokenizer of the model."""
        if card.model_input != "tokens":
            message = f"The workers of the model {card.name!r} tokenize its prompts themselves."
            raise FieldError("model", message, code="unsupported_model")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: work(self._tokenizer(card)))

    def _tokenizer(self, card: ModelCard) -> HubTokenizer:
        key = (card.directory, card.chat.template)
        if key not in self._tokenizers:
            self._tokenizers[key] = HubTokenizer(Path(card.directory), card.chat.template or "")
        return self._tokenizers[key]


def _rendered(tokenizer: HubTokenizer, asked: TokenizeRequest) -> str:
    variables: Json = {**(asked.chat_template_kwargs or {}), "add_generation_prompt": asked.add_generation_prompt}
    if asked.tools:
        variables["tools"] = asked.tools
    return tokenizer.render_chat(asked.messages or [], variables)


def _decode(body: bytes, kind: type[Kind]) -> Kind:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise FieldError(None, f"The body is not valid JSON: {error}", code="invalid_json") from None
    try:
        return msgspec.convert(decoded, kind)
    except msgspec.ValidationError as error:
        raise field_error(error, decoded, kind) from None


def _answer(body: object) -> Answer:
    return Answer(body=msgspec.json.encode(body))
