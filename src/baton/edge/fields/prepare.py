"""Checks the body of a request against the table of its route, and returns the body for the frontend."""

import msgspec

from baton.edge.fields.anthropic import MESSAGES
from baton.edge.fields.chat import CHAT
from baton.edge.fields.completions import COMPLETIONS
from baton.edge.fields.embeddings import EMBEDDINGS
from baton.edge.fields.responses import RESPONSES
from baton.edge.fields.table import Json, Table
from baton.edge.fields.wording import field_error

TABLES: dict[str, Table] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}


def prepare(path: str, body: Json) -> Json:
    """Return the body to forward: the same object if nothing changes. Raises FieldError."""
    table = TABLES[path]
    try:
        msgspec.convert(body, table.type)
    except msgspec.ValidationError as error:
        raise field_error(error, body, table.type) from None
    return table.apply(body)
