"""The text of `baton router check`: the grid and the pools of a role, and the routing of one example request."""

from collections.abc import Iterator, Sequence
from itertools import product

import msgspec

from baton.router.grid import Axis, Point
from baton.router.plan import Plan, PoolRole, RolePlan
from baton.router.select import Choice, matching_override, retry_order, select_pool

WIDTH = 100

Cell = tuple[int, ...]


class ExampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request that select its pool: prompt tokens, output tokens, targets and priority."""

    isl: int | None = None
    osl: int | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    priority: int | None = None


def render_role(role: PoolRole, plan: RolePlan, marked: Cell | None = None) -> str:
    """Return the grid of a role, with `marked` between arrows, its pools and its overrides.

    The last axis runs to the right and the one before it downwards; each bucket of the outer axes has its own table.
    """
    lines = [_headline(role, plan)]
    outer = plan.grid.axes[:-2]
    for outer_cell in product(*(range(axis.buckets) for axis in outer)):
        lines.append("")
        if outer:
            lines += [
                "  " + ", ".join(f"{axis.name} {_range(axis, n)}" for axis, n in zip(outer, outer_cell, strict=True))
            ]
        lines += _render_table(plan, outer_cell, marked)
    return "\n".join([*lines, *([""] if plan.grid.axes else []), *_render_pools(plan), *_render_overrides(plan)])


def render_decision(plan: Plan, role: PoolRole, request: ExampleRequest) -> str:
    """Return the rendered role, the pool that it selects for the request, and the reason."""
    role_plan = plan.roles[role]
    point = _point(plan, request)
    choice = select_pool(role_plan, point, request.priority)
    axes = zip(role_plan.grid.axes, choice.cell, strict=True)
    rows: list[tuple[str, str]] = [(axis.name, _bucket_text(axis, n, point, plan, request)) for axis, n in axes]
    rows.append(("selected by", _reason_text(role_plan, choice, request.priority)))
    rows.append(("on failure", _retry_text(role_plan, choice, plan)))
    width = max(len(title) for title, _ in rows)
    lines = [f"  {title:{width}}  {text}" for title, text in rows]
    grid = render_role(role, role_plan, choice.cell)
    return "\n".join([grid, "", f"  This request goes to pool {role_plan.pools[choice.pool].name}.", *lines])


def format_number(value: float) -> str:
    """Return a number without exponent or trailing zeros."""
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def _range(axis: Axis, bucket: int) -> str:
    low, high = axis.bounds(bucket)
    return f"{format_number(low)} to {format_number(high)}"


def _headline(role: PoolRole, plan: RolePlan) -> str:
    pools = "1 pool" if len(plan.pools) == 1 else f"{len(plan.pools)} pools"
    if not plan.grid.axes:
        return f"{role}: {pools}, all requests go to {plan.pools[plan.grid.cells[0]].name}"
    *rest, last = [axis.name for axis in plan.grid.axes]
    return f"{role}: {pools}, by {', '.join(rest)}{' and ' if rest else ''}{last}"


def _render_table(plan: RolePlan, outer_cell: Cell, marked: Cell | None) -> Iterator[str]:
    """Yield the table at `outer_cell` of the outer axes, split into tables that fit the width."""
    inner = plan.grid.axes[len(outer_cell) :]
    if not inner:
        return
    *rows, column = inner
    yield "  " + "".join(f"{row.name} ↓  " for row in rows) + f"{column.name} →"
    labels = _edges(rows[0]) if rows else ["", ""]
    edges = _edges(column)
    texts = _cell_texts(plan, outer_cell, marked)
    margin = max(map(len, labels)) + 3
    width = max(*(len(pool.name) + 6 for pool in plan.pools), *(len(edge) + 2 for edge in edges))
    overhang = max(map(len, edges)) // 2 + 1
    step = max(1, (WIDTH - margin - overhang) // (width + 1))
    for start in range(0, column.buckets, step):
        if start:
            yield ""
        yield _ruler(edges[start : start + step + 1], margin, width)
        yield from _box(labels, [line[start : start + step] for line in texts], margin, width)


def _cell_texts(plan: RolePlan, outer_cell: Cell, marked: Cell | None) -> list[list[str]]:
    """Return the text of each cell, in rows; a grid of one axis has one row."""
    *rows, column = plan.grid.axes[len(outer_cell) :]
    starts = [(*outer_cell, n) for n in range(rows[0].buckets)] if rows else [outer_cell]
    cells = [[(*start, n) for n in range(column.buckets)] for start in starts]
    return [[_cell_text(plan, cell, cell == marked) for cell in line] for line in cells]


def _cell_text(plan: RolePlan, cell: Cell, marked: bool) -> str:
    name = plan.pools[plan.grid.pool_of(cell)].name
    return f"▶ {name} ◀" if marked else name


def _edges(axis: Axis) -> list[str]:
    return [format_number(axis.bounds(n)[0]) for n in range(axis.buckets)] + [format_number(axis.high)]


def _ruler(edges: Sequence[str], margin: int, width: int) -> str:
    """Return the bounds of the columns, each above its line."""
    ruler = ""
    for n, edge in enumerate(edges):
        ruler = ruler.ljust(margin + n * (width + 1) - len(edge) // 2) + edge
    return ruler


def _box(labels: Sequence[str], texts: Sequence[Sequence[str]], margin: int, width: int) -> Iterator[str]:
    """Yield the rows, and the lines between them with the bounds of the buckets."""
    corners = ["┌┬┐", *["├┼┤"] * (len(texts) - 1), "└┴┘"]
    for n, (label, frame) in enumerate(zip(labels, corners, strict=True)):
        line = frame[1].join(["─" * width] * len(texts[0]))
        yield f"{label:>{margin - 1}} {frame[0]}{line}{frame[2]}"
        if n < len(texts):
            yield " " * margin + "│" + "│".join(text.center(width) for text in texts[n]) + "│"


def _render_pools(plan: RolePlan) -> list[str]:
    table = [("pool", "endpoint", "priority", "queue", "spread")]
    for pool in plan.pools:
        limit = "-" if pool.queue_limit is None else str(pool.queue_limit)
        table.append((pool.name, pool.path, str(pool.priority), limit, pool.spread))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        f"  {name:{widths[0]}}  {path:{widths[1]}}  {priority:>{widths[2]}}  {limit:>{widths[3]}}  {spread}"
        for name, path, priority, limit, spread in table
    ]


def _render_overrides(plan: RolePlan) -> list[str]:
    return [
        f"  priority {rule.low} to {rule.high} always goes to {plan.pools[rule.pool].name}" for rule in plan.overrides
    ]


def _point(plan: Plan, request: ExampleRequest) -> Point:
    length = request.isl or 0
    return Point(
        length=length,
        context=length + (request.osl or 0),
        ttft_ms=plan.ttft_ms if request.ttft_ms is None else request.ttft_ms,
        itl_ms=plan.itl_ms if request.itl_ms is None else request.itl_ms,
    )


def _bucket_text(axis: Axis, bucket: int, point: Point, plan: Plan, request: ExampleRequest) -> str:
    value, source = _axis_value(axis, point, plan, request)
    outside = ""
    if value < axis.low:
        outside = ", below the axis"
    elif value >= axis.high:
        outside = ", above the axis"
    return f"{format_number(value)} ({source}{outside}), bucket {bucket}: {_range(axis, bucket)}"


def _axis_value(axis: Axis, point: Point, plan: Plan, request: ExampleRequest) -> tuple[float, str]:
    match axis.name:
        case "length":
            return point.length, "not given" if request.isl is None else "given"
        case "context":
            prompt, output = ("not given" if count is None else str(count) for count in (request.isl, request.osl))
            return point.context, f"prompt {prompt}, output {output}"
        case "ttft_ms":
            target, default = request.ttft_ms, plan.ttft_ms
        case "itl_ms":
            target, default = request.itl_ms, plan.itl_ms
    if target is not None:
        return target, "given"
    if default is not None:
        return default, "not given, default of the file"
    return (axis.low + axis.high) / 2, "not given, middle of the axis"


def _reason_text(plan: RolePlan, choice: Choice, priority: int | None) -> str:
    cell = "mapping" + "".join(f"[{n}]" for n in choice.cell)
    number = matching_override(plan, priority)
    if number is not None:
        rule = plan.overrides[number]
        grid_pool = plan.pools[plan.grid.pool_of(choice.cell)].name
        return f"overrides[{number}], priority {rule.low} to {rule.high}; {cell} is {grid_pool}"
    reason = f"the grid, {cell}" if choice.cell else "the mapping, without axes"
    unmatched = plan.overrides and priority is not None
    return reason + (f"; no override has priority {priority}" if unmatched else "")


def _retry_text(plan: RolePlan, choice: Choice, routing: Plan) -> str:
    _, *others = retry_order(plan.pools, choice.pool, routing.retry)
    if others:
        return "retried in " + ", then ".join(plan.pools[n].name for n in others)
    if not routing.retry.faster and not routing.retry.others:
        return "not retried, retry is off"
    return "not retried, there is no " + ("other pool" if routing.retry.others else "faster pool")
