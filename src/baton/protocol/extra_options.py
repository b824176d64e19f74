"""Options that the frontend has no field for. They reach workers in an annotation of the request, as JSON.

The edge writes the annotation (`with_extra_options`), and decoding a request puts each option where a request of this
protocol has it. An option without a place stays at the top of the request, where admission refuses it by name.

`max_tokens` is the number that the client asks for. The frontend takes no 0. A request with fewer has been moved from
another worker, which has returned what the request asks to know of its prompt.
"""

import json
from collections.abc import Mapping
from typing import cast

Wire = dict[str, object]

PREFIX = "baton.options:"
ABOUT_PROMPT = ("echo", "prompt_logprobs", "return_token_ids")

_SECTIONS = {
    "bad_words": "sampling_options",
    "echo": "output_options",
    "include_stop_str_in_output": "sampling_options",
    "logit_bias": "sampling_options",
    "min_tokens": "stop_conditions",
    "prompt_logprobs": "output_options",
    "return_token_ids": "output_options",
    "stop_regex": "stop_conditions",
}


def with_extra_options(annotations: object, options: Mapping[str, object]) -> list[object]:
    """Return the annotations of a request with `options` added."""
    kept = annotations if isinstance(annotations, list) else []
    return [*kept, PREFIX + json.dumps(options, ensure_ascii=False, separators=(",", ":"))]


def take_extra_options(annotations: object) -> tuple[list[object], Wire]:
    """Return the annotations without their extra options, and those. Raises ValueError if they are not JSON objects."""
    kept: list[object] = []
    options: Wire = {}
    for annotation in annotations if isinstance(annotations, list | tuple) else ():
        if isinstance(annotation, str) and annotation.startswith(PREFIX):
            found = json.loads(annotation.removeprefix(PREFIX))
            if not isinstance(found, dict):
                raise ValueError(f"{PREFIX} an object is expected")
            options |= found
        else:
            kept.append(annotation)
    return kept, options


def place_extra_options(request: Wire) -> Wire:
    """Return `request` with its extra options where this protocol has them. Raises ValueError."""
    annotations, options = take_extra_options(request.get("annotations"))
    placed = {**request, "annotations": annotations}
    if "max_tokens" in options:
        options = _with_limit(placed, options)
    for name, value in options.items():
        if name == "structural_tag":
            sampling = _section(placed, "sampling_options")
            _section(sampling, "guided_decoding")[name] = value
        elif (section := _SECTIONS.get(name)) is not None:
            _section(placed, section)[name] = value
        else:
            placed[name] = value
    return placed


def collect_extra_options(request: Wire) -> Wire:
    """Return `request` as the runtime's frontend sends it: without nulls, and with its extra options in an annotation.

    The inverse of `place_extra_options`, for a request that goes through the runtime's own routing.
    """
    collected = cast(Wire, _without_nulls(request))
    options: Wire = {}
    for name, key in _SECTIONS.items():
        if name in (section := _section(collected, key)):
            options[name] = section.pop(name)
    sampling = _section(collected, "sampling_options")
    if "structural_tag" in (guided := _section(sampling, "guided_decoding")):
        options["structural_tag"] = guided.pop("structural_tag")
    if not guided:
        del sampling["guided_decoding"]
    if "diffusion" in collected:
        options["diffusion"] = collected.pop("diffusion")
    if options:
        collected["annotations"] = with_extra_options(collected.get("annotations"), options)
    return collected


def _without_nulls(value: object) -> object:
    """Return `value` without the keys that are null; objects that clients define are not changed."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        return [_without_nulls(each) for each in value]
    if not isinstance(value, dict):
        return value
    opaque = ("json", "extra_args")
    return {key: each if key in opaque else _without_nulls(each) for key, each in value.items() if each is not None}


def _with_limit(request: Wire, options: Wire) -> Wire:
    """Set the limit of `request` if it is 0; return the options that are still to be placed."""
    asked, stop = options["max_tokens"], request.get("stop_conditions")
    limit = stop.get("max_tokens") if isinstance(stop, Mapping) else None
    if isinstance(asked, int) and isinstance(limit, int) and asked > limit:
        return {name: value for name, value in options.items() if name not in ("max_tokens", *ABOUT_PROMPT)}
    if asked == 0:
        _section(request, "stop_conditions")["max_tokens"] = 0
    return {name: value for name, value in options.items() if name != "max_tokens"}


def _section(request: Wire, key: str) -> Wire:
    """Return a copy of the section of `request` that it now holds."""
    section = request.get(key)
    request[key] = copy = dict(cast(Mapping[str, object], section)) if isinstance(section, Mapping) else {}
    return copy
