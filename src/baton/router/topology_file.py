"""Reads topology files: Baton's format in YAML or JSON, or the JSON of Dynamo's global router. See docs/router.md."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from baton.router.baton_format import read_baton_format
from baton.router.dynamo_format import is_dynamo_format, read_dynamo_format
from baton.router.parsing import Problems, Tree, load_tree
from baton.router.plan import Aggregated, Disaggregated, Plan, PoolRole, RolePlan
from baton.router.specs import ENDPOINTS, FileSpec, build_role_plan, warn_unused


class WorkerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that `baton serve --topology` starts for a pool. Its settings override those of the file."""

    role: PoolRole
    pool: str
    namespace: str
    count: int
    settings: Tree


class TopologyFile(msgspec.Struct, frozen=True, kw_only=True):
    """The routing plan of a file and the workers to start. `settings` apply to all of them."""

    plan: Plan
    groups: tuple[WorkerGroup, ...]
    settings: Tree


def read_topology(path: Path, namespace: str, pool_endpoint: str = "") -> TopologyFile:
    """Return the content of the file; `namespace` is the router's own.

    `pool_endpoint` is the component and endpoint of pools for which the file names none; empty: Baton's workers.

    Raises ConfigError, in one line with the path of each problem inside the file. Logs a warning for what is valid but
    probably a mistake.
    """
    tree = load_tree(path)
    problems = Problems(path)
    read = read_dynamo_format if is_dynamo_format(tree) else read_baton_format
    endpoints = dict.fromkeys(ENDPOINTS, pool_endpoint) if pool_endpoint else ENDPOINTS
    spec = read(tree, namespace, endpoints, problems)
    problems.raise_if_any()
    _check_namespaces(spec, namespace, problems)
    plans = {role: build_role_plan(section, problems) for role, section in spec.roles.items()}
    problems.raise_if_any()
    for role, plan in plans.items():
        warn_unused(plan, spec.roles[role], spec.retry, path)
    return TopologyFile(plan=_build_plan(spec, plans), groups=tuple(_worker_groups(spec)), settings=spec.settings)


def _check_namespaces(spec: FileSpec, namespace: str, problems: Problems) -> None:
    for section in spec.roles.values():
        for pool in section.pools:
            if pool.namespace == namespace:
                problems.add(
                    pool.at, f'"{namespace}" is the router\'s own namespace; its frontend would bypass the router'
                )


def _build_plan(spec: FileSpec, plans: dict[PoolRole, RolePlan]) -> Plan:
    mode: Disaggregated | Aggregated
    if "aggregated" in plans:
        mode = Aggregated(plans["aggregated"])
    else:
        mode = Disaggregated(plans["prefill"], plans["decode"])
    return Plan(mode=mode, ttft_ms=spec.ttft_ms, itl_ms=spec.itl_ms, retry=spec.retry, adaptive=spec.adaptive)


def _worker_groups(spec: FileSpec) -> Iterator[WorkerGroup]:
    for role, section in spec.roles.items():
        for each in section.pools:
            if each.workers:
                yield WorkerGroup(
                    role=role,
                    pool=each.pool.name,
                    namespace=each.namespace,
                    count=each.workers,
                    settings=each.settings,
                )
