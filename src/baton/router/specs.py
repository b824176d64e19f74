"""The content of a topology file with the path of each value, and its validation into role plans."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from baton.router.grid import Axis, Grid
from baton.router.parsing import Problems, Tree, count_entries
from baton.router.plan import Override, Pool, PoolRole, Retry, RolePlan
from baton.router.select import retry_order

log = logging.getLogger(__name__)

MAX_BOUND = 1e12
MAX_BUCKETS = 10_000
Endpoints = Mapping[PoolRole, str]

ENDPOINTS: Endpoints = {
    "prefill": "prefill.generate",
    "decode": "decode.generate",
    "aggregated": "worker.generate",
}
"""Component and endpoint of Baton's workers, below their namespace."""


class AxisSpec(msgspec.Struct, frozen=True):
    """An axis, its path, and the names that the file gives to it and its bounds."""

    axis: Axis
    at: str
    title: str
    low_key: str = "min"
    high_key: str = "max"
    buckets_key: str = "buckets"


class OverrideSpec(msgspec.Struct, frozen=True):
    """An override whose pool is not resolved yet: a name or a number."""

    at: str
    low: int
    high: int
    pool: object
    pool_key: str = "pool"


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A pool, and the count and settings of the workers to start for it."""

    at: str
    pool: Pool
    namespace: str
    workers: int = 0
    settings: Tree = {}


class RoleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The section of one role. Every value has its type; relations between values are not checked yet."""

    at: str
    pools: tuple[PoolSpec, ...]
    axes: tuple[AxisSpec, ...]
    mapping: object
    mapping_at: str
    overrides: tuple[OverrideSpec, ...]
    has_names: bool
    """Whether the file may refer to pools by name; otherwise only by number."""


class FileSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A whole file."""

    roles: dict[PoolRole, RoleSpec]
    retry: Retry
    ttft_ms: float | None = None
    itl_ms: float | None = None
    adaptive: bool = False
    settings: Tree = {}


def build_role_plan(spec: RoleSpec, problems: Problems) -> RolePlan:
    """Return the plan of a role. The result is only valid if no problem was recorded."""
    _check_pools(spec.pools, problems)
    for axis in spec.axes:
        _check_axis(axis, problems)
    cells = _resolve_cells(spec.mapping, spec.axes, spec.mapping_at, spec, problems)
    overrides = []
    for rule in spec.overrides:
        if rule.low > rule.high:
            problems.add(rule.at, f"min {rule.low} is above max {rule.high}")
        pool = _resolve_pool(rule.pool, f"{rule.at}.{rule.pool_key}", spec, problems)
        overrides.append(Override(rule.low, rule.high, pool))
    return RolePlan(
        pools=tuple(each.pool for each in spec.pools),
        grid=Grid(tuple(each.axis for each in spec.axes), tuple(cells)),
        overrides=tuple(overrides),
    )


def _check_pools(pools: Sequence[PoolSpec], problems: Problems) -> None:
    names: dict[str, str] = {}
    paths: dict[str, str] = {}
    for spec in pools:
        at, pool = spec.at, spec.pool
        if names.setdefault(pool.name, at) != at:
            problems.add(at, f'the name "{pool.name}" is already used by {names[pool.name]}')
        elif paths.setdefault(pool.path, at) != at:
            problems.add(at, f"the endpoint {pool.path} is already used by {paths[pool.path]}")


def _check_axis(spec: AxisSpec, problems: Problems) -> None:
    axis = spec.axis
    for key, bound in ((spec.low_key, axis.low), (spec.high_key, axis.high)):
        if not abs(bound) <= MAX_BOUND:
            problems.add(spec.at, f"{key} is {bound:g}; it must be a number up to {MAX_BOUND:g}")
            return
    if not 1 <= axis.buckets <= MAX_BUCKETS:
        problems.add(spec.at, f"{spec.buckets_key} is {axis.buckets}; it must be from 1 to {MAX_BUCKETS}")
    elif axis.low >= axis.high:
        low, high = f"{spec.low_key} {axis.low:.15g}", f"{spec.high_key} {axis.high:.15g}"
        problems.add(spec.at, f"{low} is not below {high}")
    elif any(low >= high for low, high in map(axis.bounds, range(axis.buckets))):
        problems.add(spec.at, f"too narrow for {axis.buckets} buckets")


def _resolve_cells(mapping: object, axes: Sequence[AxisSpec], at: str, spec: RoleSpec, problems: Problems) -> list[int]:
    """Return the pool of each cell: `mapping` has one level of lists for each axis."""
    if not axes:
        return [_resolve_pool(mapping, at, spec, problems)]
    title, buckets = axes[0].title, axes[0].axis.buckets
    if not isinstance(mapping, list):
        problems.add(at, f"must be a list with an entry for each of the {buckets} buckets of {title}")
        return []
    if len(mapping) != buckets:
        problems.add(at, f"has {count_entries(mapping)}, {title} has {buckets} buckets")
    rows = (_resolve_cells(row, axes[1:], f"{at}[{n}]", spec, problems) for n, row in enumerate(mapping))
    return [cell for row in rows for cell in row]


def _resolve_pool(pool: object, at: str, spec: RoleSpec, problems: Problems) -> int:
    names = [each.pool.name for each in spec.pools]
    match pool:
        case bool() if spec.has_names:
            problems.add(at, f"a pool name that YAML reads as {str(pool).lower()} must be quoted")
        case int() if not isinstance(pool, bool):
            if 0 <= pool < len(names):
                return pool
            problems.add(at, f"there is no pool {pool}; pools are numbered from 0 to {len(names) - 1}")
        case str() if spec.has_names:
            if pool in names:
                return names.index(pool)
            problems.add(at, f'there is no pool "{pool}"; pools: {", ".join(names)}')
        case list():
            problems.add(at, "is a list, but there is no axis for it")
        case _:
            problems.add(at, "must be a pool " + ("name or number" if spec.has_names else "number"))
    return 0


def warn_unused(plan: RolePlan, spec: RoleSpec, retry: Retry, file: Path) -> None:
    """Log overrides that never apply, and pools that no cell, override or retry selects."""
    reached = set(plan.grid.cells)
    for n, rule in enumerate(plan.overrides):
        if any(earlier.low <= rule.low and rule.high <= earlier.high for earlier in plan.overrides[:n]):
            log.warning("%s: %s: never used, an earlier override covers its priorities", file, spec.overrides[n].at)
        else:
            reached.add(rule.pool)
    for selected in tuple(reached):
        reached.update(retry_order(plan.pools, selected, retry))
    if unused := [pool.name for n, pool in enumerate(plan.pools) if n not in reached]:
        log.warning("%s: %s: no request can reach %s", file, spec.at, ", ".join(unused))
