"""Grids as text, for a terminal: where on the axes a request lies, and which pool it has there."""

from collections.abc import Iterator, Sequence
from itertools import product

from baton.router.grid import Axis
from baton.router.plan import Part, PartName

WIDTH = 100

Cell = tuple[int, ...]


def draw_part(name: PartName, part: Part, marked: Cell | None = None) -> str:
    """Return a picture of the part: its grid, with `marked` between arrows, its pools and its overrides.

    The last axis runs to the right and the one before it downwards; of those before there is a table for each bucket.
    """
    lines = [_headline(name, part)]
    outer = part.grid.axes[:-2]
    for place in product(*(range(axis.buckets) for axis in outer)):
        lines.append("")
        if outer:
            lines += ["  " + ", ".join(f"{axis.name} {span(axis, n)}" for axis, n in zip(outer, place, strict=True))]
        lines += _grid(part, place, marked)
    return "\n".join([*lines, *([""] if part.grid.axes else []), *_pools(part), *_overrides(part)])


def amount(value: float) -> str:
    """Return a number as people write it."""
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def span(axis: Axis, index: int) -> str:
    """Return where a bucket begins and where it ends."""
    low, high = axis.bounds(index)
    return f"{amount(low)} to {amount(high)}"


def _headline(name: PartName, part: Part) -> str:
    pools = "1 pool" if len(part.pools) == 1 else f"{len(part.pools)} pools"
    if not part.grid.axes:
        return f"{name}: {pools}, requests go to {part.pools[part.grid.cells[0]].name}"
    *rest, last = [axis.name for axis in part.grid.axes]
    return f"{name}: {pools}, by {', '.join(rest)}{' and ' if rest else ''}{last}"


def _grid(part: Part, place: Cell, marked: Cell | None) -> Iterator[str]:
    """Yield the table at `place` of the outer axes, in pieces side by side that are as wide as the terminal."""
    match part.grid.axes[len(place) :]:
        case []:
            return
        case [column]:
            yield f"  {column.name} →"
            cells, labels = [[(*place, c) for c in range(column.buckets)]], ["", ""]
        case [row, column]:
            yield f"  {row.name} ↓  {column.name} →"
            cells = [[(*place, r, c) for c in range(column.buckets)] for r in range(row.buckets)]
            labels = _edges(row)
    texts = [[_text(part, cell, cell == marked) for cell in line] for line in cells]
    edges = _edges(column)
    margin = max(map(len, labels)) + 3
    width = max(*(len(pool.name) + 6 for pool in part.pools), *(len(edge) + 2 for edge in edges))
    overhang = max(map(len, edges)) // 2 + 1
    step = max(1, (WIDTH - margin - overhang) // (width + 1))
    for start in range(0, column.buckets, step):
        if start:
            yield ""
        yield _ruler(edges[start : start + step + 1], margin, width)
        yield from _table(labels, [line[start : start + step] for line in texts], margin, width)


def _edges(axis: Axis) -> list[str]:
    return [amount(axis.bounds(n)[0]) for n in range(axis.buckets)] + [amount(axis.high)]


def _text(part: Part, cell: Cell, marked: bool) -> str:
    name = part.pools[part.grid.pool_of(cell)].name
    return f"▶ {name} ◀" if marked else name


def _ruler(edges: Sequence[str], margin: int, width: int) -> str:
    """Return the edges of columns, each above its line."""
    ruler = ""
    for n, edge in enumerate(edges):
        ruler = ruler.ljust(margin + n * (width + 1) - len(edge) // 2) + edge
    return ruler


def _table(labels: Sequence[str], texts: Sequence[Sequence[str]], margin: int, width: int) -> Iterator[str]:
    """Yield the rows, and between them lines that are labelled with where buckets meet."""
    for n, label in enumerate(labels):
        left, cross, right = "┌┬┐" if n == 0 else "└┴┘" if n == len(texts) else "├┼┤"
        yield f"{label:>{margin - 1}} {left}" + cross.join(["─" * width] * len(texts[0])) + right
        if n < len(texts):
            yield " " * margin + "│" + "│".join(text.center(width) for text in texts[n]) + "│"


def _pools(part: Part) -> list[str]:
    table = [("pool", "at", "priority", "queue", "spread")]
    for pool in part.pools:
        limit = "-" if pool.queue_limit is None else str(pool.queue_limit)
        table.append((pool.name, pool.path, str(pool.priority), limit, pool.spread))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        f"  {name:{widths[0]}}  {path:{widths[1]}}  {priority:>{widths[2]}}  {limit:>{widths[3]}}  {spread}"
        for name, path, priority, limit, spread in table
    ]


def _overrides(part: Part) -> list[str]:
    return [
        f"  priority {one.low} to {one.high} goes to {part.pools[one.pool].name} wherever it lies"
        for one in part.overrides
    ]
