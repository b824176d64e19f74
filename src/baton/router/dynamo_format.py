"""The files of Dynamo's global router, of both generations: the older one names times without their unit."""

import logging
import re
from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar

import msgspec

from baton.router.grid import Axis, AxisName
from baton.router.parsing import FORMS, NAME, Problems, Tree, entries, shaped
from baton.router.plan import PartName, Pool, Retry
from baton.router.specs import ENDPOINTS, AxisDraft, FileDraft, OverrideDraft, PartDraft, PoolDraft

log = logging.getLogger(__name__)
T = TypeVar("T")

# Their names, and ours.
_MODES: dict[str, dict[str, PartName]] = {
    "disagg": {"prefill": "prefill", "decode": "decode"},
    "agg": {"agg": "aggregated"},
}
_AXES: dict[str, AxisName] = {"isl": "length", "context_length": "context", "ttft": "ttft_ms", "itl": "itl_ms"}
_OLDER = {f"{axis}_{bound}": f"{axis}_{bound}_ms" for axis in ("ttft", "itl") for bound in ("min", "max")}

_GRIDS = {"prefill": ["isl", "ttft"], "decode": ["context_length", "itl"], "agg": ["ttft", "itl"]}
_NEVER_OURS = {
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


class _Top(msgspec.Struct):
    mode: Literal["disagg", "agg"] = "disagg"
    enable_priority_retry: bool = False


class _Override(msgspec.Struct, forbid_unknown_fields=True):
    min_priority: int
    max_priority: int
    target_pool: int


def is_reference(content: Tree) -> bool:
    """Return whether a file is one of these, by what ours cannot have."""
    return content.get("mode") in tuple(_MODES) or not _NEVER_OURS.isdisjoint(content)


def read_reference(content: Tree, _namespace: str, problems: Problems) -> FileDraft:
    """Return what such a file says. It can be used only if no problem was noted."""
    top = shaped(content, _Top, "", problems)
    if top is None:
        return FileDraft(parts={}, retry=Retry())
    parts: dict[PartName, PartDraft] = {}
    for prefix, part in _MODES[top.mode].items():
        strategy = _take(content, f"{prefix}_pool_selection_strategy", dict[str, object], "", problems)
        if strategy is not None:
            parts[part] = _part(content, _renewed(strategy), prefix, part, problems)
    _warn(content, _MODES[top.mode], problems)
    return FileDraft(parts=parts, retry=Retry(faster=top.enable_priority_retry))


def _part(content: Tree, strategy: Tree, prefix: str, part: PartName, problems: Problems) -> PartDraft:
    at = f"{prefix}_pool_selection_strategy"
    mapping = f"{prefix}_pool_mapping"
    return PartDraft(
        at=at,
        pools=tuple(_pools(content, prefix, part, problems)),
        axes=tuple(_axes(strategy, prefix, at, problems)),
        mapping=_take(strategy, mapping, list[object], at, problems),
        mapping_at=f"{at}.{mapping}",
        overrides=tuple(_overrides(strategy, at, problems)),
        has_names=False,
    )


def _take(tree: Tree, key: str, kind: type[T], at: str, problems: Problems) -> T | None:
    place = f"{at}.{key}" if at else key
    if tree.get(key) is None:
        problems.add(place, "missing")
        return None
    return shaped(tree[key], kind, place, problems)


def _renewed(strategy: Tree) -> Tree:
    """Return the strategy with the newer names of its keys; where it has both, the newer one counts."""
    older = {new: strategy[old] for old, new in _OLDER.items() if old in strategy}
    return older | {key: value for key, value in strategy.items() if key not in _OLDER}


def _pools(content: Tree, prefix: str, part: PartName, problems: Problems) -> Iterator[PoolDraft]:
    at = f"{prefix}_pool_dynamo_namespaces"
    namespaces = _take(content, at, list[object], "", problems)
    count = _take(content, f"num_{prefix}_pools", int, "", problems)
    if namespaces is None:
        return
    if not namespaces:
        problems.add(at, "is empty")
    if count is not None and count != len(namespaces):
        problems.add(at, f"has {entries(namespaces)}, num_{prefix}_pools is {count}")
    priorities = _priorities(content, prefix, len(namespaces), problems)
    for n, (one, priority) in enumerate(zip(namespaces, priorities, strict=False)):
        namespace = shaped(one, str, f"{at}[{n}]", problems)
        if namespace is not None and not re.fullmatch(NAME, namespace):
            problems.add(f"{at}[{n}]", FORMS[NAME])
        elif namespace is not None:
            pool = Pool(name=namespace, path=f"{namespace}.{ENDPOINTS[part]}", priority=priority)
            yield PoolDraft(at=f"{at}[{n}]", pool=pool, namespace=namespace)


def _priorities(content: Tree, prefix: str, count: int, problems: Problems) -> list[int]:
    at = f"{prefix}_pool_priorities"
    if content.get(at) is None:
        return list(range(count))
    given = shaped(content[at], list[object], at, problems) or []
    if len(given) != count:
        problems.add(at, f"has {entries(given)} for {count} pools")
    found = [shaped(one, int, f"{at}[{n}]", problems) for n, one in enumerate(given)]
    return [one or 0 for one in found]


def _axes(strategy: Tree, prefix: str, at: str, problems: Problems) -> Iterator[AxisDraft]:
    names = _GRIDS[prefix]
    # An aggregated grid may begin with the prompt's length, and does if any of its keys is there.
    if prefix == "agg" and any(key.startswith("isl_") for key in strategy):
        names = ["isl", *names]
    for name in names:
        low_key, high_key, buckets_key = _bounds(name)
        low = _take(strategy, low_key, float, at, problems)
        high = _take(strategy, high_key, float, at, problems)
        buckets = _take(strategy, buckets_key, int, at, problems)
        if low is not None and high is not None and buckets is not None:
            yield AxisDraft(Axis(_AXES[name], low, high, buckets), at, name, low_key, high_key, buckets_key)


def _bounds(axis: str) -> tuple[str, str, str]:
    unit = "_ms" if f"{axis}_min" in _OLDER else ""
    return f"{axis}_min{unit}", f"{axis}_max{unit}", f"{axis}_resolution"


def _overrides(strategy: Tree, at: str, problems: Problems) -> Iterator[OverrideDraft]:
    at = f"{at}.priority_overrides"
    rules = shaped(strategy.get("priority_overrides") or [], list[object], at, problems) or []
    for n, one in enumerate(rules):
        if rule := shaped(one, _Override, f"{at}[{n}]", problems):
            yield OverrideDraft(f"{at}[{n}]", rule.min_priority, rule.max_priority, rule.target_pool, "target_pool")


def _warn(content: Tree, prefixes: Iterable[str], problems: Problems) -> None:
    """Log once which names are old, and once which have no meaning: the reference itself does no more."""
    older: dict[str, str] = {}
    ignored = sorted(content.keys() - _NEVER_OURS - {"mode"})
    for prefix in prefixes:
        at = f"{prefix}_pool_selection_strategy"
        known = {"priority_overrides", f"{prefix}_pool_mapping", *(key for axis in _AXES for key in _bounds(axis))}
        keys = strategy if isinstance(strategy := content.get(at), dict) else {}
        older |= {key: _OLDER[key] for key in keys if key in _OLDER}
        ignored += [f"{at}.{key}" for key in keys if key not in known | _OLDER.keys()]
    if older:
        now = ", ".join(older.values())
        log.warning("%s: %s are older names; write %s", problems.file, ", ".join(older), now)
    if ignored:
        log.warning("%s: not known, and ignored: %s", problems.file, ", ".join(ignored))
