"""Why one request goes where it goes, in words."""

import msgspec

from baton.router.grid import Axis, Point
from baton.router.plan import Part, PartName, Plan
from baton.router.render import amount, draw_part, span
from baton.router.retry import retry_order
from baton.router.select import Choice, matching_override, select_pool


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a request may say: its prompt's tokens, those it may generate, its targets and its priority."""

    isl: int | None = None
    osl: int | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    priority: int | None = None


def explain(plan: Plan, name: PartName, request: Request) -> str:
    """Return a picture of one part of the plan, and what becomes of the request there."""
    part = plan.parts[name]
    point = _point(plan, request)
    choice = select_pool(part, point, request.priority)
    rows = [_axis(axis, n, point, plan, request) for axis, n in zip(part.grid.axes, choice.cell, strict=True)]
    rows.append(("chosen by", _reason(part, choice, request.priority)))
    rows.append(("if it fails", _next(part, choice, plan)))
    width = max(len(title) for title, _ in rows)
    lines = [f"  {title:{width}}  {text}" for title, text in rows]
    picture = draw_part(name, part, choice.cell)
    return "\n".join([picture, "", f"  This request goes to {part.pools[choice.pool].name}.", *lines])


def _point(plan: Plan, request: Request) -> Point:
    length = request.isl or 0
    return Point(
        length=length,
        context=length + (request.osl or 0),
        ttft_ms=plan.ttft_ms if request.ttft_ms is None else request.ttft_ms,
        itl_ms=plan.itl_ms if request.itl_ms is None else request.itl_ms,
    )


def _axis(axis: Axis, bucket: int, point: Point, plan: Plan, request: Request) -> tuple[str, str]:
    value, source = _value(axis, point, plan, request)
    outside = ", before the axis" if value < axis.low else ", past the axis" if value >= axis.high else ""
    return axis.name, f"{amount(value)} ({source}{outside}), so bucket {bucket}: {span(axis, bucket)}"


def _value(axis: Axis, point: Point, plan: Plan, request: Request) -> tuple[float, str]:
    match axis.name:
        case "length":
            return point.length, "not given" if request.isl is None else "given"
        case "context":
            prompt, answer = ("not given" if one is None else str(one) for one in (request.isl, request.osl))
            return point.context, f"prompt {prompt}, answer {answer}"
        case "ttft_ms":
            given, default = request.ttft_ms, plan.ttft_ms
        case "itl_ms":
            given, default = request.itl_ms, plan.itl_ms
    if given is not None:
        return given, "given"
    if default is not None:
        return default, "not given, the file's default"
    return (axis.low + axis.high) / 2, "not given, the middle of the axis"


def _reason(part: Part, choice: Choice, priority: int | None) -> str:
    cell = "mapping" + "".join(f"[{n}]" for n in choice.cell)
    number = matching_override(part, priority)
    if number is None:
        unmatched = part.overrides and priority is not None
        return (f"the grid, {cell}" if choice.cell else "the mapping, without axes") + (
            f"; no override has priority {priority}" if unmatched else ""
        )
    rule = part.overrides[number]
    there = part.pools[part.grid.pool_of(choice.cell)].name
    return f"overrides[{number}], priority {rule.low} to {rule.high}; {cell} is {there}"


def _next(part: Part, choice: Choice, plan: Plan) -> str:
    _, *others = retry_order(part.pools, choice.pool, plan.retry)
    if others:
        return ", then ".join(part.pools[n].name for n in others)
    if not plan.retry.faster and not plan.retry.others:
        return "nowhere, retry is off"
    return "nowhere, there is no " + ("other pool" if plan.retry.others else "faster pool")
