"""What a request says that decides where it goes, read from the wire without changing anything."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from baton.errors import InvalidRequest
from baton.ports.runtime import Wire
from baton.router.grid import Point


class Ask(NamedTuple):
    """Where a request lies on the axes, and its priority if it has one."""

    point: Point
    priority: int | None


def read_ask(request: Wire, ttft_ms: float | None = None, itl_ms: float | None = None) -> Ask:
    """Return what `request` asks for; the targets given here are for one that gives none.

    The context is the prompt and what may still come after it, as far as the request says. Raises InvalidRequest.
    """
    routing, stop = _object(request, "routing"), _object(request, "stop_conditions")
    targets, older = _object(request, "router"), _object(request, "extra_args")
    tokens = request.get("token_ids")
    length = len(tokens) if isinstance(tokens, list) else 0
    coming = _whole(routing, "routing", "expected_output_tokens") or _whole(stop, "stop_conditions", "max_tokens") or 0
    point = Point(
        length=length,
        context=length + coming,
        ttft_ms=_target(targets, older, "ttft_target", ttft_ms),
        itl_ms=_target(targets, older, "itl_target", itl_ms),
    )
    return Ask(point, _whole(routing, "routing", "priority"))


def _object(request: Wire, key: str) -> Mapping[str, object]:
    value = request.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{key}: expected an object, got {type(value).__name__}")
    return value


def _whole(fields: Mapping[str, object], place: str, key: str) -> int | None:
    value = fields.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise InvalidRequest(f"{place}.{key}: expected a whole number, got {value!r}")
    return value


def _target(now: Mapping[str, object], older: Mapping[str, object], key: str, default: float | None) -> float | None:
    """Return a target in milliseconds; older frontends have it among `extra_args`."""
    for place, fields in (("router", now), ("extra_args", older)):
        value = fields.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
            raise InvalidRequest(f"{place}.{key}: expected milliseconds, 0 or more, got {value!r}")
        return float(value)
    return default
