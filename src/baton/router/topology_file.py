"""Plans from files: ours, in YAML or JSON, or the reference's JSON. docs/router.md describes them."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from baton.router.baton_format import read_layout
from baton.router.dynamo_format import is_reference, read_reference
from baton.router.parsing import Problems, Tree, read_content
from baton.router.plan import Aggregated, Disaggregated, Part, PartName, Plan
from baton.router.specs import FileDraft, make_part, warn_of_waste


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that `baton serve --topology` starts for a pool. Its settings win over those of the blueprint."""

    part: PartName
    pool: str
    namespace: str
    count: int
    settings: Tree


class Blueprint(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and the workers that its file asks for. `settings` are for all of them."""

    plan: Plan
    groups: tuple[Group, ...]
    settings: Tree


def read_blueprint(path: Path, namespace: str) -> Blueprint:
    """Return what the file says; `namespace` is the router's own.

    Raises ConfigError that says in one line what is wrong, and at which places in the file. Logs a warning for what is
    allowed and can hardly be meant.
    """
    content = read_content(path)
    problems = Problems(path)
    read = read_reference if is_reference(content) else read_layout
    draft = read(content, namespace, problems)
    problems.raise_any()
    _keep_apart(draft, namespace, problems)
    parts = {name: make_part(part, problems) for name, part in draft.parts.items()}
    problems.raise_any()
    for name, part in parts.items():
        warn_of_waste(part, draft.parts[name], draft.retry, path)
    return Blueprint(plan=_plan(draft, parts), groups=tuple(_groups(draft)), settings=draft.settings)


def _keep_apart(draft: FileDraft, namespace: str, problems: Problems) -> None:
    for part in draft.parts.values():
        for pool in part.pools:
            if pool.namespace == namespace:
                problems.add(
                    pool.at, f'"{namespace}" is the router\'s own namespace, whose frontend would pass the router by'
                )


def _plan(draft: FileDraft, parts: dict[PartName, Part]) -> Plan:
    mode: Disaggregated | Aggregated
    if "aggregated" in parts:
        mode = Aggregated(parts["aggregated"])
    else:
        mode = Disaggregated(parts["prefill"], parts["decode"])
    return Plan(mode=mode, ttft_ms=draft.ttft_ms, itl_ms=draft.itl_ms, retry=draft.retry, adaptive=draft.adaptive)


def _groups(draft: FileDraft) -> Iterator[Group]:
    for name, part in draft.parts.items():
        for one in part.pools:
            if one.workers:
                yield Group(
                    part=name,
                    pool=one.pool.name,
                    namespace=one.namespace,
                    count=one.workers,
                    settings=one.settings,
                )
