"""Fields that the frontend has no place for: they go to the workers in an annotation of the request."""

from collections.abc import Mapping

from baton.edge.routes import Json
from baton.protocol.extra_options import with_extra_options

_CARRIED = ("bad_words", "logit_bias", "stop_regex", "structural_tag")
# The edge answers requests with these (`prompt_requests.py`); the frontend refuses some even if they ask for nothing.
_ANSWERED = ("prompt_logprobs", "return_token_ids", "truncate_prompt_tokens")


def carry_extra_options(body: Json) -> Json:
    """Return the body with those fields in an annotation: the same object if it has none of them."""
    options = {name: body[name] for name in _CARRIED if name in body}
    moved = options.keys() | {name for name in _ANSWERED if name in body and _asks_for_nothing(body[name])}
    if not moved:
        return body
    rest = {name: value for name, value in body.items() if name not in moved}
    given = _not_null(options)
    return with_options(rest, given) if given else rest


def _not_null(options: Json) -> Json:
    return {name: value for name, value in options.items() if value is not None}


def _asks_for_nothing(value: object) -> bool:
    return value is None or value is False


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
