"""Prompts and inputs: a text or its tokens, or a list of texts, or of lists of tokens."""

from collections.abc import Sequence

from baton.edge.errors import FieldError
from baton.edge.fields.table import Json


def check_prompt(body: Json, name: str) -> Json:
    """Refuse a list of unlike or empty items. Returns `body`."""
    prompt = body[name]
    if isinstance(prompt, list) and len(kinds := set(map(type, prompt))) > 1:
        first = type(prompt[0])
        number = next(number for number, item in enumerate(prompt) if type(item) is not first)
        names = sorted(_NOUNS[kind] for kind in kinds)
        message = f"Invalid '{name}': a list of {' and '.join(names)}. Its items must be of one type."
        raise FieldError(f"{name}[{number}]", message, code="invalid_type")
    return body


_NOUNS: dict[type, str] = {str: "texts", int: "tokens", list: "lists of tokens"}


def empty_item(items: Sequence[object]) -> int | None:
    """Return the index of the first empty text or list of tokens, None if there is none."""
    return next((number for number, item in enumerate(items) if item in ("", [])), None)
