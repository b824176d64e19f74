"""Baton's own format of a topology file.

Items of lists are converted one by one, because msgspec does not report the index of an invalid item.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.router.grid import Axis, AxisName
from baton.router.parsing import ENDPOINT, NAME, Problems, Tree, convert
from baton.router.plan import Pool, PoolRole, Retry
from baton.router.specs import ENDPOINTS, MAX_BOUND, AxisSpec, Endpoints, FileSpec, OverrideSpec, PoolSpec, RoleSpec

Target = Annotated[float, Meta(ge=0, le=MAX_BOUND)]
Name = Annotated[str, Meta(pattern=NAME)]

BLOCK_SIZE = Pool(name="", path="", priority=0).block_size
_ROLES: dict[str, tuple[PoolRole, ...]] = {"disaggregated": ("prefill", "decode"), "aggregated": ("aggregated",)}


class _Defaults(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    ttft_ms: Target | None = None
    itl_ms: Target | None = None


class _Retry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    faster: bool = True
    others: bool = False


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["disaggregated", "aggregated"]
    defaults: _Defaults = msgspec.field(default_factory=_Defaults)
    retry: _Retry = msgspec.field(default_factory=_Retry)
    adaptive: bool = False
    settings: Tree = {}
    prefill: Tree | None = None
    decode: Tree | None = None
    aggregated: Tree | None = None


class _Role(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pools: Annotated[list[object], Meta(min_length=1)]
    axes: list[object] = []
    mapping: object = None
    overrides: list[object] = []


class _Workers(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    count: Annotated[int, Meta(ge=1, le=256)] = 1
    settings: Tree = {}


class _Pool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: Name
    namespace: Name | None = None
    endpoint: Annotated[str, Meta(pattern=ENDPOINT)] | None = None
    priority: int | None = None
    queue_limit: Annotated[int, Meta(ge=1)] | None = None
    spread: Literal["round-robin", "kv"] = "round-robin"
    block_size: Annotated[int, Meta(ge=1)] = BLOCK_SIZE
    workers: _Workers | None = None


class _Axis(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: AxisName
    min: float
    max: float
    buckets: int


class _Override(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    min: int
    max: int
    pool: int | str


def read_baton_format(tree: Tree, namespace: str, endpoints: Endpoints, problems: Problems) -> FileSpec:
    """Return the content of a file in this format. The result is only valid if no problem was recorded."""
    file = convert(tree, _File, "", problems)
    if file is None:
        return FileSpec(roles={}, retry=Retry())
    sections: dict[PoolRole, Tree | None] = {
        "prefill": file.prefill,
        "decode": file.decode,
        "aggregated": file.aggregated,
    }
    roles: dict[PoolRole, RoleSpec] = {}
    for role, section in sections.items():
        expected = role in _ROLES[file.mode]
        if expected != (section is not None):
            problems.add(role, "missing" if expected else f"not allowed with mode {file.mode}")
        elif section is not None:
            roles[role] = _read_role(section, role, namespace, endpoints[role], problems)
    return FileSpec(
        roles=roles,
        retry=Retry(faster=file.retry.faster, others=file.retry.others),
        ttft_ms=file.defaults.ttft_ms,
        itl_ms=file.defaults.itl_ms,
        adaptive=file.adaptive,
        settings=file.settings,
    )


def _read_role(tree: Tree, role: PoolRole, namespace: str, endpoint: str, problems: Problems) -> RoleSpec:
    section = convert(tree, _Role, role, problems) or _Role(pools=[])
    pools = [_read_pool(item, n, role, namespace, endpoint, problems) for n, item in enumerate(section.pools)]
    axes = _read_axes(section.axes, f"{role}.axes", problems)
    overrides = [_read_override(item, f"{role}.overrides[{n}]", problems) for n, item in enumerate(section.overrides)]
    return RoleSpec(
        at=role,
        pools=tuple(filter(None, pools)),
        axes=axes,
        mapping=_read_mapping(section, bool(axes), f"{role}.mapping", problems),
        mapping_at=f"{role}.mapping",
        overrides=tuple(filter(None, overrides)),
        has_names=True,
    )


def _read_mapping(section: _Role, has_axes: bool, at: str, problems: Problems) -> object:
    """Return the mapping, which a single pool without axes does not need."""
    if section.mapping is not None or not section.pools:
        return section.mapping
    if len(section.pools) > 1 or has_axes:
        problems.add(at, "missing")
    return 0


def _read_pool(
    value: object, number: int, role: PoolRole, namespace: str, default_endpoint: str, problems: Problems
) -> PoolSpec | None:
    at = f"{role}.pools[{number}]"
    pool = convert(value, _Pool, at, problems)
    if pool is None:
        return None
    prefix = namespace if role == "aggregated" else f"{namespace}-{role}"
    pool_namespace = pool.namespace or f"{prefix}-{pool.name}"
    endpoint = _read_endpoint(pool, role, default_endpoint, at, problems)
    return PoolSpec(
        at=at,
        namespace=pool_namespace,
        pool=Pool(
            name=pool.name,
            path=f"{pool_namespace}.{endpoint}",
            priority=number if pool.priority is None else pool.priority,
            queue_limit=pool.queue_limit,
            spread=pool.spread,
            block_size=pool.block_size,
        ),
        workers=pool.workers.count if pool.workers else 0,
        settings=pool.workers.settings if pool.workers else {},
    )


def _read_endpoint(pool: _Pool, role: PoolRole, default: str, at: str, problems: Problems) -> str:
    if not pool.workers:
        return pool.endpoint or default
    served = ENDPOINTS[role]
    if pool.endpoint not in (None, served):
        problems.add(f"{at}.endpoint", f"workers started from this file serve {served}; remove endpoint or workers")
    return served


def _read_axes(items: list[object], at: str, problems: Problems) -> tuple[AxisSpec, ...]:
    """Return the axes. They are a list because the levels of the mapping follow their order."""
    axes: list[AxisSpec] = []
    for number, item in enumerate(items):
        path = f"{at}[{number}]"
        axis = convert(item, _Axis, path, problems)
        if axis is None:
            continue
        if any(axis.name == other.title for other in axes):
            problems.add(f"{path}.name", f"duplicate axis {axis.name}")
        axes.append(AxisSpec(Axis(axis.name, axis.min, axis.max, axis.buckets), path, axis.name))
    return tuple(axes)


def _read_override(value: object, at: str, problems: Problems) -> OverrideSpec | None:
    override = convert(value, _Override, at, problems)
    return None if override is None else OverrideSpec(at, override.min, override.max, override.pool)
