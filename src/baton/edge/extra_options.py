"""Fields that the frontend has no place for: they go to the workers in an annotation of the request."""

from collections.abc import Mapping

from baton.edge.routes import Json
from baton.protocol.extra_options import with_extra_options

_CARRIED = ("bad_words", "diffusion", "logit_bias", "stop_regex", "structural_tag")
# The edge answers requests with these (`prompt_requests.py`); the frontend refuses some even if they ask for nothing.
_ANSWERED = ("prompt_logprobs", "return_token_ids", "truncate_prompt_tokens")
_FIELDS = frozenset((*_CARRIED, *_ANSWERED))


def carry_extra_options(body: Json) -> Json:
    """Return the body with those fields in an annotation: the same object if it has none of them."""
    if _FIELDS.isdisjoint(body):  # nearly always
        return body
    options = {name: value for name, value in body.items() if name in _CARRIED and value is not None}
    rest = {name: value for name, value in body.items() if _stays(name, value)}
    return with_options(rest, options) if options else rest


def _stays(name: str, value: object) -> bool:
    return name not in _CARRIED and not (name in _ANSWERED and (value is None or value is False))


def with_options(body: Json, options: Mapping[str, object], returned: tuple[str, ...] = ()) -> Json:
    """Return the body with an annotation that holds `options`; the answer's `nvext` is to contain `returned`."""
    given = body.get("nvext")
    extensions = dict(given) if isinstance(given, dict) else {}
    extensions["annotations"] = with_extra_options(extensions.get("annotations"), options)
    if returned:
        fields = extensions.get("extra_fields")
        asked = fields if isinstance(fields, list) else []
        extensions["extra_fields"] = [*asked, *(field for field in returned if field not in asked)]
    return {**body, "nvext": extensions}
