"""The embeddings format: an OpenAI body in, vectors out. Workers that embed own their tokenizer."""

from typing import Literal, TypeVar

import msgspec

from baton.protocol.codec import DecodeError, Wire, convert
from baton.protocol.requests import TokenId

MAX_INPUTS = 2048  # as at OpenAI

T = TypeVar("T")


class Texts(msgspec.Struct, frozen=True, tag="texts"):
    """Inputs as text."""

    items: tuple[str, ...]


class TokenLists(msgspec.Struct, frozen=True, tag="tokens"):
    """Inputs as tokens; no special tokens are added."""

    items: tuple[tuple[int, ...], ...]


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs to embed: at least one and at most MAX_INPUTS, none of them empty."""

    model: str
    source: Texts | TokenLists
    dimensions: int | None = None


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """One vector for each input: base64 of 32-bit floats, little-endian. The frontend decodes them."""

    model: str
    vectors: tuple[str, ...]
    prompt_tokens: int


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    input: str | tuple[str | TokenId | tuple[TokenId, ...], ...]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None


def decode_embed(raw: object) -> EmbedRequest:
    """Return the request that an OpenAI body describes. Raises DecodeError, naming the field and its place."""
    if not isinstance(raw, dict):
        raise DecodeError(f"Expected `object`, got `{type(raw).__name__}` - at `$`")
    body = convert(raw, _Body)
    source = _source(body.input)
    if not source.items:
        raise DecodeError("input: the list is empty")
    if len(source.items) > MAX_INPUTS:
        raise DecodeError(f"input: {len(source.items)} inputs; one request has at most {MAX_INPUTS}")
    for place, item in enumerate(source.items):
        if not item:
            raise DecodeError(f"input[{place}]: there is nothing to embed")
    return EmbedRequest(model=body.model, source=source, dimensions=body.dimensions)


def encode_embeddings(reply: Embeddings) -> Wire:
    """Return `reply` in OpenAI's format."""
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(reply.vectors)]
    usage = {"prompt_tokens": reply.prompt_tokens, "total_tokens": reply.prompt_tokens}
    return {"object": "list", "data": data, "model": reply.model, "usage": usage}


def _source(given: str | tuple[str | int | tuple[int, ...], ...]) -> Texts | TokenLists:
    if isinstance(given, str):
        return Texts((given,))
    if len(texts := _only(str, given)) == len(given):
        return Texts(texts)
    if len(tokens := _only(int, given)) == len(given):
        return TokenLists((tokens,))
    if len(lists := _only(tuple, given)) == len(given):
        return TokenLists(lists)
    raise DecodeError("input: texts, tokens and lists of tokens cannot be mixed")


def _only(kind: type[T], items: tuple[object, ...]) -> tuple[T, ...]:
    return tuple(item for item in items if isinstance(item, kind))
