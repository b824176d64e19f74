"""The JSON files of Dynamo's global router, in both versions: the older one names times without their unit."""

import logging
import re
from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar

import msgspec

from baton.router.grid import Axis, AxisName
from baton.router.parsing import NAME, PATTERN_MESSAGES, Problems, Tree, convert, count_entries
from baton.router.plan import Pool, PoolRole, Retry
from baton.router.specs import AxisSpec, Endpoints, FileSpec, OverrideSpec, PoolSpec, RoleSpec

log = logging.getLogger(__name__)
T = TypeVar("T")

# Dynamo's names, and ours.
_MODES: dict[str, dict[str, PoolRole]] = {
    "disagg": {"prefill": "prefill", "decode": "decode"},
    "agg": {"agg": "aggregated"},
}
_AXES: dict[str, AxisName] = {"isl": "length", "context_length": "context", "ttft": "ttft_ms", "itl": "itl_ms"}
_DEPRECATED = {f"{axis}_{bound}": f"{axis}_{bound}_ms" for axis in ("ttft", "itl") for bound in ("min", "max")}

_GRIDS = {"prefill": ["isl", "ttft"], "decode": ["context_length", "itl"], "agg": ["ttft", "itl"]}
_DYNAMO_KEYS = {
    "enable_priority_retry",
    *(
        key
        for prefix in _GRIDS
        for key in (
            f"num_{prefix}_pools",
            f"{prefix}_pool_dynamo_namespaces",
            f"{prefix}_pool_priorities",
            f"{prefix}_pool_selection_strategy",
        )
    ),
}


class _File(msgspec.Struct):
    mode: Literal["disagg", "agg"] = "disagg"
    enable_priority_retry: bool = False


class _Override(msgspec.Struct, forbid_unknown_fields=True):
    min_priority: int
    max_priority: int
    target_pool: int


def is_dynamo_format(tree: Tree) -> bool:
    """Return whether a file has a mode or a key that only this format has."""
    return tree.get("mode") in tuple(_MODES) or not _DYNAMO_KEYS.isdisjoint(tree)


def read_dynamo_format(tree: Tree, _namespace: str, endpoints: Endpoints, problems: Problems) -> FileSpec:
    """Return the content of a file in this format. The result is only valid if no problem was recorded."""
    file = convert(tree, _File, "", problems)
    if file is None:
        return FileSpec(roles={}, retry=Retry())
    roles: dict[PoolRole, RoleSpec] = {}
    for prefix, role in _MODES[file.mode].items():
        strategy = _require(tree, f"{prefix}_pool_selection_strategy", dict[str, object], "", problems)
        if strategy is not None:
            pools = tuple(_read_pools(tree, prefix, endpoints[role], problems))
            roles[role] = _read_role(_with_current_names(strategy), prefix, pools, problems)
    _warn_deprecated(tree, _MODES[file.mode], problems)
    _warn_unknown(tree, _MODES[file.mode], problems)
    return FileSpec(roles=roles, retry=Retry(faster=file.enable_priority_retry))


def _read_role(strategy: Tree, prefix: str, pools: tuple[PoolSpec, ...], problems: Problems) -> RoleSpec:
    at = f"{prefix}_pool_selection_strategy"
    mapping = f"{prefix}_pool_mapping"
    return RoleSpec(
        at=at,
        pools=pools,
        axes=tuple(_read_axes(strategy, prefix, at, problems)),
        mapping=_require(strategy, mapping, list[object], at, problems),
        mapping_at=f"{at}.{mapping}",
        overrides=tuple(_read_overrides(strategy, at, problems)),
        has_names=False,
    )


def _require(tree: Tree, key: str, kind: type[T], at: str, problems: Problems) -> T | None:
    path = f"{at}.{key}" if at else key
    if tree.get(key) is None:
        problems.add(path, "missing")
        return None
    return convert(tree[key], kind, path, problems)


def _with_current_names(strategy: Tree) -> Tree:
    """Return the strategy with its deprecated keys renamed; a current key takes precedence over its deprecated one."""
    renamed = {new: strategy[old] for old, new in _DEPRECATED.items() if old in strategy}
    return renamed | {key: value for key, value in strategy.items() if key not in _DEPRECATED}


def _read_pools(tree: Tree, prefix: str, endpoint: str, problems: Problems) -> Iterator[PoolSpec]:
    at = f"{prefix}_pool_dynamo_namespaces"
    namespaces = _require(tree, at, list[object], "", problems)
    count = _require(tree, f"num_{prefix}_pools", int, "", problems)
    if namespaces is None:
        return
    if not namespaces:
        problems.add(at, "is empty")
    if count is not None and count != len(namespaces):
        problems.add(at, f"has {count_entries(namespaces)}, num_{prefix}_pools is {count}")
    priorities = _read_priorities(tree, prefix, len(namespaces), problems)
    for n, (item, priority) in enumerate(zip(namespaces, priorities, strict=False)):
        namespace = convert(item, str, f"{at}[{n}]", problems)
        if namespace is not None and not re.fullmatch(NAME, namespace):
            problems.add(f"{at}[{n}]", PATTERN_MESSAGES[NAME])
        elif namespace is not None:
            pool = Pool(name=namespace, path=f"{namespace}.{endpoint}", priority=priority)
            yield PoolSpec(at=f"{at}[{n}]", pool=pool, namespace=namespace)


def _read_priorities(tree: Tree, prefix: str, count: int, problems: Problems) -> list[int]:
    at = f"{prefix}_pool_priorities"
    if tree.get(at) is None:
        return list(range(count))
    items = convert(tree[at], list[object], at, problems) or []
    if len(items) != count:
        problems.add(at, f"has {count_entries(items)} for {count} pools")
    return [convert(item, int, f"{at}[{n}]", problems) or 0 for n, item in enumerate(items)]


def _read_axes(strategy: Tree, prefix: str, at: str, problems: Problems) -> Iterator[AxisSpec]:
    names = _GRIDS[prefix]
    # The prompt length is an optional first axis of an aggregated grid: any of its keys requires all of them.
    if prefix == "agg" and any(key.startswith("isl_") for key in strategy):
        names = ["isl", *names]
    for name in names:
        low_key, high_key, buckets_key = _axis_keys(name)
        low = _require(strategy, low_key, float, at, problems)
        high = _require(strategy, high_key, float, at, problems)
        buckets = _require(strategy, buckets_key, int, at, problems)
        if low is not None and high is not None and buckets is not None:
            yield AxisSpec(Axis(_AXES[name], low, high, buckets), at, name, low_key, high_key, buckets_key)


def _axis_keys(axis: str) -> tuple[str, str, str]:
    unit = "_ms" if f"{axis}_min" in _DEPRECATED else ""
    return f"{axis}_min{unit}", f"{axis}_max{unit}", f"{axis}_resolution"


def _read_overrides(strategy: Tree, at: str, problems: Problems) -> Iterator[OverrideSpec]:
    at = f"{at}.priority_overrides"
    items = convert(strategy.get("priority_overrides") or [], list[object], at, problems) or []
    for n, item in enumerate(items):
        if rule := convert(item, _Override, f"{at}[{n}]", problems):
            yield OverrideSpec(f"{at}[{n}]", rule.min_priority, rule.max_priority, rule.target_pool, "target_pool")


def _warn_deprecated(tree: Tree, prefixes: Iterable[str], problems: Problems) -> None:
    found = {key: None for prefix in prefixes for key in _strategy_keys(tree, prefix) if key in _DEPRECATED}
    if found:
        current = ", ".join(_DEPRECATED[key] for key in found)
        log.warning("%s: %s are deprecated; use %s", problems.file, ", ".join(found), current)


def _warn_unknown(tree: Tree, prefixes: Iterable[str], problems: Problems) -> None:
    """Log keys without a meaning. They are not an error, because Dynamo ignores them too."""
    unknown = sorted(tree.keys() - _DYNAMO_KEYS - {"mode"})
    axis_keys = {key for axis in _AXES for key in _axis_keys(axis)}
    for prefix in prefixes:
        known = {"priority_overrides", f"{prefix}_pool_mapping"} | axis_keys | _DEPRECATED.keys()
        unknown += [f"{prefix}_pool_selection_strategy.{k}" for k in _strategy_keys(tree, prefix) if k not in known]
    if unknown:
        log.warning("%s: ignoring unknown keys: %s", problems.file, ", ".join(unknown))


def _strategy_keys(tree: Tree, prefix: str) -> list[str]:
    strategy = tree.get(f"{prefix}_pool_selection_strategy")
    return list(strategy) if isinstance(strategy, dict) else []
