"""The fields of a request that select its pool, read from the wire without changing it."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from baton.errors import InvalidRequest
from baton.ports.runtime import Wire
from baton.router.grid import Point


class RequestView(NamedTuple):
    """The point of a request on the axes, and its priority if it has one."""

    point: Point
    priority: int | None


def view_request(request: Wire, ttft_ms: float | None = None, itl_ms: float | None = None) -> RequestView:
    """Return the view of `request`; `ttft_ms` and `itl_ms` are the default targets.

    The context is the prompt plus the output tokens that the request expects or allows. Raises InvalidRequest.
    """
    routing, stop = _object(request, "routing"), _object(request, "stop_conditions")
    targets, extra = _object(request, "router"), _object(request, "extra_args")
    tokens = request.get("token_ids")
    length = len(tokens) if isinstance(tokens, list) else 0
    output = _integer(routing, "routing", "expected_output_tokens") or _integer(stop, "stop_conditions", "max_tokens")
    point = Point(
        length=length,
        context=length + (output or 0),
        ttft_ms=_target(targets, extra, "ttft_target", ttft_ms),
        itl_ms=_target(targets, extra, "itl_target", itl_ms),
    )
    return RequestView(point, _integer(routing, "routing", "priority"))


def _object(request: Wire, key: str) -> Mapping[str, object]:
    value = request.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{key}: expected an object, got {type(value).__name__}")
    return value


def _integer(fields: Mapping[str, object], section: str, key: str) -> int | None:
    value = fields.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise InvalidRequest(f"{section}.{key}: expected an integer, got {value!r}")
    return value


def _target(
    targets: Mapping[str, object], extra: Mapping[str, object], key: str, default: float | None
) -> float | None:
    """Return a target in milliseconds; older frontends send it in `extra_args`."""
    for section, fields in (("router", targets), ("extra_args", extra)):
        value = fields.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
            raise InvalidRequest(f"{section}.{key}: expected milliseconds, 0 or more, got {value!r}")
        return float(value)
    return default
