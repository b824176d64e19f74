"""The prompt of a request in text format, as tokens. Slow for long texts: call it off the event loop."""

from collections.abc import Mapping, Sequence

from baton.errors import InvalidRequest
from baton.ports.tokenizer import Tokenizer
from baton.protocol.text import TextRequest


def tokenize(request: TextRequest, tokenizer: Tokenizer, variables: Mapping[str, object]) -> Sequence[int]:
    """Return the tokens of the prompt, or of the chat, whose template gets `variables`. Raises InvalidRequest."""
    if request.messages is not None:
        if not request.messages:
            raise InvalidRequest("messages: the list is empty")
        return tokenizer.encode(tokenizer.render_chat(request.messages, variables))
    match request.prompt:
        case str(text) | (str(text),):
            return tokenizer.encode(text)
        case tuple(tokens) if all(isinstance(token, int) for token in tokens):
            return [int(token) for token in tokens]
        case _:
            raise InvalidRequest("prompt: expected one text or one list of token ids")
