"""What a file says of a part, with the places where it says so; and what must hold before that is part of a plan."""

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton.router.grid import Axis, Grid
from baton.router.parsing import Problems, Tree, entries
from baton.router.plan import Override, Part, PartName, Pool, Retry
from baton.router.retry import retry_order

log = logging.getLogger(__name__)

LARGEST = 1e12
MOST_BUCKETS = 10_000
ENDPOINTS: dict[PartName, str] = {
    "prefill": "prefill.generate",
    "decode": "decode.generate",
    "aggregated": "worker.generate",
}
"""Where Baton's workers are reached, below their namespace."""


class AxisDraft(msgspec.Struct, frozen=True):
    """An axis, where it is written and what its file calls it and its bounds."""

    axis: Axis
    at: str
    title: str
    low_key: str = "min"
    high_key: str = "max"
    buckets_key: str = "buckets"


class OverrideDraft(msgspec.Struct, frozen=True):
    """An override whose pool is a name or a number still."""

    at: str
    low: int
    high: int
    pool: object
    pool_key: str = "pool"


class PoolDraft(msgspec.Struct, frozen=True, kw_only=True):
    """A pool, and how many workers with which settings its file asks for."""

    at: str
    pool: Pool
    namespace: str
    workers: int = 0
    settings: Tree = {}


class PartDraft(msgspec.Struct, frozen=True, kw_only=True):
    """A part as a file has it: every value has its type, and nothing else is known."""

    at: str
    pools: tuple[PoolDraft, ...]
    axes: tuple[AxisDraft, ...]
    mapping: object
    mapping_at: str
    overrides: tuple[OverrideDraft, ...]
    has_names: bool
    """Whether the file may call pools by their names; otherwise by their numbers only."""


class FileDraft(msgspec.Struct, frozen=True, kw_only=True):
    """A whole file."""

    parts: dict[PartName, PartDraft]
    retry: Retry
    ttft_ms: float | None = None
    itl_ms: float | None = None
    adaptive: bool = False
    settings: Tree = {}


def make_part(draft: PartDraft, problems: Problems) -> Part:
    """Return the part. It can be used only if no problem was noted."""
    _check_pools(draft.pools, problems)
    for axis in draft.axes:
        _check_axis(axis, problems)
    pools = tuple(one.pool for one in draft.pools)
    cells = _cells(draft.mapping, draft.axes, draft.mapping_at, draft, problems)
    overrides = []
    for one in draft.overrides:
        if one.low > one.high:
            problems.add(one.at, f"min {one.low} is above max {one.high}")
        overrides.append(Override(one.low, one.high, _number(one.pool, f"{one.at}.{one.pool_key}", draft, problems)))
    grid = Grid(tuple(one.axis for one in draft.axes), tuple(cells))
    return Part(pools=pools, grid=grid, overrides=tuple(overrides))


def _check_pools(pools: Sequence[PoolDraft], problems: Problems) -> None:
    names: dict[str, str] = {}
    paths: dict[str, str] = {}
    for draft in pools:
        at, pool = draft.at, draft.pool
        if names.setdefault(pool.name, at) != at:
            problems.add(at, f'"{pool.name}" is the name of {names[pool.name]} already')
        elif paths.setdefault(pool.path, at) != at:
            problems.add(at, f"{pool.path} is where {paths[pool.path]} is already")


def _check_axis(draft: AxisDraft, problems: Problems) -> None:
    axis = draft.axis
    for key, bound in ((draft.low_key, axis.low), (draft.high_key, axis.high)):
        if not abs(bound) <= LARGEST:
            problems.add(draft.at, f"{key} is {bound:g}, and must be a number up to {LARGEST:g}")
            return
    if not 1 <= axis.buckets <= MOST_BUCKETS:
        problems.add(draft.at, f"{draft.buckets_key} is {axis.buckets}, and must be from 1 to {MOST_BUCKETS}")
    elif axis.low >= axis.high:
        low, high = f"{draft.low_key} {axis.low:.15g}", f"{draft.high_key} {axis.high:.15g}"
        problems.add(draft.at, f"{low} is not below {high}")
    elif any(low >= high for low, high in map(axis.bounds, range(axis.buckets))):
        problems.add(draft.at, f"too narrow for {axis.buckets} buckets")


def _cells(mapping: object, axes: Sequence[AxisDraft], at: str, draft: PartDraft, problems: Problems) -> list[int]:
    """Return the pools that `mapping` names, level by level: one level for each axis."""
    if not axes:
        return [_number(mapping, at, draft, problems)]
    title, buckets = axes[0].title, axes[0].axis.buckets
    if not isinstance(mapping, list):
        problems.add(at, f"must be a list with an entry for each of the {buckets} buckets of {title}")
        return []
    if len(mapping) != buckets:
        problems.add(at, f"has {entries(mapping)}, {title} has {buckets} buckets")
    return [cell for n, inner in enumerate(mapping) for cell in _cells(inner, axes[1:], f"{at}[{n}]", draft, problems)]


def _number(pool: object, at: str, draft: PartDraft, problems: Problems) -> int:
    names = [one.pool.name for one in draft.pools]
    match pool:
        case bool() if draft.has_names:
            problems.add(at, f"a pool's name must be quoted if YAML takes it for {str(pool).lower()}")
        case int() if not isinstance(pool, bool):
            if 0 <= pool < len(names):
                return pool
            problems.add(at, f"there is no pool {pool}; pools are numbered from 0 to {len(names) - 1}")
        case str() if draft.has_names:
            if pool in names:
                return names.index(pool)
            problems.add(at, f'no pool is called "{pool}"; there are: {", ".join(names)}')
        case list():
            problems.add(at, "is a list, but there is no axis for it")
        case _:
            problems.add(at, "must be a pool's " + ("name or number" if draft.has_names else "number"))
    return 0


def warn_of_waste(part: Part, draft: PartDraft, retry: Retry, file: Path) -> None:
    """Log which overrides are never used, and which pools no cell, override or retry leads to."""
    reached = set(part.grid.cells)
    for n, one in enumerate(part.overrides):
        if any(earlier.low <= one.low and one.high <= earlier.high for earlier in part.overrides[:n]):
            log.warning("%s: %s: never used, for one before it has the same priorities", file, draft.overrides[n].at)
        else:
            reached.add(one.pool)
    for selected in tuple(reached):
        reached.update(retry_order(part.pools, selected, retry))
    if lost := [pool.name for n, pool in enumerate(part.pools) if n not in reached]:
        log.warning("%s: %s: no request can reach %s", file, draft.at, ", ".join(lost))
