"""The fields of `/v1/completions`."""

from baton.edge.fields import types
from baton.edge.fields.prompts import check_prompt
from baton.edge.fields.shared import EXTENSIONS, SAMPLING
from baton.edge.fields.table import Json, Table, honoured, refused

DEFAULT_MAX_TOKENS = 16


def _complete(body: Json) -> Json:
    return body if "max_tokens" in body else {**body, "max_tokens": DEFAULT_MAX_TOKENS}


COMPLETIONS = Table(
    "CompletionRequest",
    (
        honoured("model", str, required=True),
        honoured("prompt", types.Prompt, required=True, check=lambda body: check_prompt(body, "prompt")),
        honoured(
            "max_tokens", types.Count, f"{DEFAULT_MAX_TOKENS} if it is left out; null: to the end of the context."
        ),
        *SAMPLING,
        honoured("logprobs", types.Count, "Up to 5."),
        honoured("echo", bool, "Depends on the engine with `logprobs`."),
        honoured("best_of", types.Choices, "Only equal to `n`."),
        refused("suffix", "text is appended, not inserted", str, ("",)),
        *EXTENSIONS,
    ),
    complete=_complete,
)
