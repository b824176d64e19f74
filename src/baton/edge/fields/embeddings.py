"""The fields of `/v1/embeddings`."""

from typing import Literal

from baton.edge.errors import FieldError
from baton.edge.fields import types
from baton.edge.fields.prompts import check_prompt, empty_item
from baton.edge.fields.shared import USER
from baton.edge.fields.table import Json, Table, honoured


def _input(body: Json) -> Json:
    check_prompt(body, "input")
    given = body["input"]
    if given == "":
        raise FieldError("input", "Invalid 'input': input cannot be an empty string.", code="invalid_value")
    if isinstance(given, list) and (number := empty_item(given)) is not None:
        raise FieldError(f"input[{number}]", f"Invalid 'input[{number}]': it is empty.", code="invalid_value")
    return body


EMBEDDINGS = Table(
    "EmbeddingRequest",
    (
        honoured("model", str, required=True),
        honoured("input", types.Prompt, required=True, check=_input),
        honoured("dimensions", types.Positive, "Only for models that can shorten their vectors."),
        honoured("encoding_format", Literal["float", "base64"]),
        USER,
        honoured("nvext", dict[str, object]),
    ),
)
