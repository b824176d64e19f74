"""Our layout of a router's file. Lists are taken apart here, for msgspec does not say which item of one is wrong."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.router.grid import Axis, AxisName
from baton.router.parsing import ENDPOINT, NAME, Problems, Tree, shaped
from baton.router.plan import PartName, Pool, Retry
from baton.router.specs import ENDPOINTS, LARGEST, AxisDraft, FileDraft, OverrideDraft, PartDraft, PoolDraft

Target = Annotated[float, Meta(ge=0, le=LARGEST)]
Name = Annotated[str, Meta(pattern=NAME)]

BLOCK_SIZE = Pool(name="", path="", priority=0).block_size
_PARTS: dict[str, tuple[PartName, ...]] = {"disaggregated": ("prefill", "decode"), "aggregated": ("aggregated",)}


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


class _Part(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
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


def read_layout(content: Tree, namespace: str, problems: Problems) -> FileDraft:
    """Return what a file of our layout says. It can be used only if no problem was noted."""
    file = shaped(content, _File, "", problems)
    if file is None:
        return FileDraft(parts={}, retry=Retry())
    found: dict[PartName, Tree | None] = {
        "prefill": file.prefill,
        "decode": file.decode,
        "aggregated": file.aggregated,
    }
    parts: dict[PartName, PartDraft] = {}
    for name, section in found.items():
        belongs = name in _PARTS[file.mode]
        if belongs != (section is not None):
            problems.add(name, "missing" if belongs else f"mode {file.mode} has no such part")
        elif section is not None:
            parts[name] = _part(section, name, namespace, problems)
    return FileDraft(
        parts=parts,
        retry=Retry(faster=file.retry.faster, others=file.retry.others),
        ttft_ms=file.defaults.ttft_ms,
        itl_ms=file.defaults.itl_ms,
        adaptive=file.adaptive,
        settings=file.settings,
    )


def _part(section: Tree, name: PartName, namespace: str, problems: Problems) -> PartDraft:
    part = shaped(section, _Part, name, problems) or _Part(pools=[])
    pools = [_pool(one, n, name, namespace, problems) for n, one in enumerate(part.pools)]
    axes = _axes(part.axes, f"{name}.axes", problems)
    overrides = [_override(one, f"{name}.overrides[{n}]", problems) for n, one in enumerate(part.overrides)]
    mapping = part.mapping
    if mapping is None and len(part.pools) == 1 and not axes:
        mapping = 0
    elif mapping is None and part.pools:
        problems.add(f"{name}.mapping", "missing")
    return PartDraft(
        at=name,
        pools=tuple(pool for pool in pools if pool is not None),
        axes=axes,
        mapping=mapping,
        mapping_at=f"{name}.mapping",
        overrides=tuple(override for override in overrides if override is not None),
        has_names=True,
    )


def _pool(content: object, number: int, part: PartName, namespace: str, problems: Problems) -> PoolDraft | None:
    at = f"{part}.pools[{number}]"
    pool = shaped(content, _Pool, at, problems)
    if pool is None:
        return None
    prefix = namespace if part == "aggregated" else f"{namespace}-{part}"
    place = pool.namespace or f"{prefix}-{pool.name}"
    endpoint = pool.endpoint or ENDPOINTS[part]
    if pool.workers and endpoint != ENDPOINTS[part]:
        problems.add(f"{at}.endpoint", f"workers started from this file are at {ENDPOINTS[part]}; drop it, or workers")
    return PoolDraft(
        at=at,
        namespace=place,
        pool=Pool(
            name=pool.name,
            path=f"{place}.{endpoint}",
            priority=number if pool.priority is None else pool.priority,
            queue_limit=pool.queue_limit,
            spread=pool.spread,
            block_size=pool.block_size,
        ),
        workers=pool.workers.count if pool.workers else 0,
        settings=pool.workers.settings if pool.workers else {},
    )


def _axes(listed: list[object], at: str, problems: Problems) -> tuple[AxisDraft, ...]:
    """Return the axes: a list, for the mapping's levels go by their order, and not every tool keeps that of keys."""
    axes: list[AxisDraft] = []
    for number, content in enumerate(listed):
        place = f"{at}[{number}]"
        axis = shaped(content, _Axis, place, problems)
        if axis is None:
            continue
        if any(axis.name == other.title for other in axes):
            problems.add(f"{place}.name", f"{axis.name} is an axis already")
        axes.append(AxisDraft(Axis(axis.name, axis.min, axis.max, axis.buckets), place, axis.name))
    return tuple(axes)


def _override(content: object, at: str, problems: Problems) -> OverrideDraft | None:
    override = shaped(content, _Override, at, problems)
    return None if override is None else OverrideDraft(at, override.min, override.max, override.pool)
