"""Fields that the frontend has no place for: they go to the workers in an annotation of the request."""

from collections.abc import Mapping

from baton.edge.routes import Json
from baton.protocol.extra_options import with_extra_options

CARRIED = ("bad_words", "logit_bias", "stop_regex", "structural_tag")


def carry_extra_options(body: Json) -> Json:
    """Return the body with those fields in an annotation: the same object if it has none of them."""
    found = [name for name in CARRIED if name in body]
    if not found:
        return body
    options = {name: body[name] for name in found if body[name] is not None}
    rest = {name: value for name, value in body.items() if name not in CARRIED}
    return with_options(rest, options) if options else rest


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
