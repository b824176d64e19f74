"""Files of Dynamo's global router: both versions are read, and route as Dynamo documents it."""

import json
import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.router.grid import Axis, Grid, Point
from baton.router.plan import Aggregated, Disaggregated, Override, Plan, Pool, Retry, RolePlan
from baton.router.select import retry_order, select_pool
from baton.router.topology_file import TopologyFile, read_topology
from tests.unit.router.trees import MISSING, changed

# The grids of Dynamo's examples.
TWO_BY_TWO: dict[str, Any] = {
    "num_prefill_pools": 2,
    "num_decode_pools": 1,
    "prefill_pool_dynamo_namespaces": ["gp-prefill-0", "gp-prefill-1"],
    "decode_pool_dynamo_namespaces": ["gp-decode-0"],
    "prefill_pool_selection_strategy": {
        "ttft_min_ms": 10,
        "ttft_max_ms": 3000,
        "ttft_resolution": 2,
        "isl_min": 0,
        "isl_max": 32000,
        "isl_resolution": 2,
        "prefill_pool_mapping": [[0, 1], [0, 1]],
    },
    "decode_pool_selection_strategy": {
        "itl_min_ms": 10,
        "itl_max_ms": 500,
        "itl_resolution": 2,
        "context_length_min": 0,
        "context_length_max": 32000,
        "context_length_resolution": 2,
        "decode_pool_mapping": [[0, 0], [0, 0]],
    },
}
AGGREGATED: dict[str, Any] = {
    "mode": "agg",
    "enable_priority_retry": False,
    "num_agg_pools": 2,
    "agg_pool_dynamo_namespaces": ["agg_pool_0", "agg_pool_1"],
    "agg_pool_selection_strategy": {
        "ttft_min_ms": 0,
        "ttft_max_ms": 1000,
        "ttft_resolution": 2,
        "itl_min_ms": 0,
        "itl_max_ms": 1000,
        "itl_resolution": 1,
        "agg_pool_mapping": [[0], [1]],
        "priority_overrides": [],
    },
}


def read(tmp_path: Path, content: object) -> TopologyFile:
    path = tmp_path / "router.json"
    path.write_text(json.dumps(content))
    return read_topology(path, "baton")


@pytest.mark.parametrize(("endpoint", "served"), [("", "worker.generate"), ("router.generate", "router.generate")])
def test_pools_are_workers_of_baton_or_have_a_router_of_their_own(tmp_path: Path, endpoint: str, served: str) -> None:
    path = tmp_path / "router.json"
    path.write_text(json.dumps(AGGREGATED))
    (role_plan,) = read_topology(path, "baton", endpoint).plan.roles.values()
    assert [pool.path for pool in role_plan.pools] == [f"agg_pool_0.{served}", f"agg_pool_1.{served}"]


def test_default_targets_of_the_settings_take_precedence(tmp_path: Path) -> None:
    plan = read(tmp_path, AGGREGATED).plan
    assert (plan.ttft_ms, plan.itl_ms) == (None, None)
    given = plan.with_default_targets(0.0, None)
    assert (given.ttft_ms, given.itl_ms) == (0.0, None)
    assert given.with_default_targets(None, 20.0).ttft_ms == 0.0


def read_error(tmp_path: Path, content: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content)
    return caught.value.message.removeprefix(f"{tmp_path / 'router.json'}: ")


def older(content: dict[str, Any]) -> dict[str, Any]:
    """Return the same file with the keys of the older version."""
    text = json.dumps(content)
    for name in ("ttft_min", "ttft_max", "itl_min", "itl_max"):
        text = text.replace(f'"{name}_ms"', f'"{name}"')
    result: dict[str, Any] = json.loads(text)
    return result


def aggregated(**strategy: object) -> dict[str, Any]:
    content = deepcopy(AGGREGATED)
    content["agg_pool_selection_strategy"].update(strategy)
    return content


def role_plan(tmp_path: Path, content: object, role: Any = "aggregated") -> RolePlan:
    return read(tmp_path, content).plan.roles[role]


def point(**values: Any) -> Point:
    return Point(**{"length": 0, "context": 0} | values)


def test_disaggregated_file_is_read(tmp_path: Path) -> None:
    prefill = RolePlan(
        pools=(
            Pool(name="gp-prefill-0", path="gp-prefill-0.prefill.generate", priority=0),
            Pool(name="gp-prefill-1", path="gp-prefill-1.prefill.generate", priority=1),
        ),
        grid=Grid((Axis("length", 0, 32000, 2), Axis("ttft_ms", 10, 3000, 2)), (0, 1, 0, 1)),
    )
    decode = RolePlan(
        pools=(Pool(name="gp-decode-0", path="gp-decode-0.decode.generate", priority=0),),
        grid=Grid((Axis("context", 0, 32000, 2), Axis("itl_ms", 10, 500, 2)), (0, 0, 0, 0)),
    )
    plan = Plan(mode=Disaggregated(prefill, decode), retry=Retry())
    assert read(tmp_path, TWO_BY_TWO) == TopologyFile(plan=plan, groups=(), settings={})
    assert read(tmp_path, TWO_BY_TWO | {"mode": "disagg"}).plan == plan


def test_aggregated_file_is_read(tmp_path: Path) -> None:
    plan = RolePlan(
        pools=(
            Pool(name="agg_pool_0", path="agg_pool_0.worker.generate", priority=0),
            Pool(name="agg_pool_1", path="agg_pool_1.worker.generate", priority=1),
        ),
        grid=Grid((Axis("ttft_ms", 0, 1000, 2), Axis("itl_ms", 0, 1000, 1)), (0, 1)),
    )
    assert read(tmp_path, AGGREGATED).plan == Plan(mode=Aggregated(plan), retry=Retry())
    assert [select_pool(plan, point(ttft_ms=target)).pool for target in (100, 900, None)] == [0, 1, 1]


@pytest.mark.parametrize("content", [TWO_BY_TWO, AGGREGATED])
def test_both_versions_give_equal_plans_and_the_older_one_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: dict[str, Any]
) -> None:
    current = read(tmp_path, content)
    assert caplog.text == ""
    assert read(tmp_path, older(content)) == current
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"{tmp_path / 'router.json'}: ttft_min, ttft_max, itl_min, itl_max are deprecated;"
        " use ttft_min_ms, ttft_max_ms, itl_min_ms, itl_max_ms"
    )


def test_current_key_takes_precedence_over_deprecated_key(tmp_path: Path) -> None:
    assert read(tmp_path, aggregated(ttft_min=7, ttft_max=8)) == read(tmp_path, AGGREGATED)


def test_target_grid_routes_as_documented(tmp_path: Path) -> None:
    bounds = {"ttft_min_ms": 10, "ttft_max_ms": 3000, "itl_min_ms": 5, "itl_max_ms": 200, "itl_resolution": 2}
    plan = role_plan(tmp_path, aggregated(**bounds, agg_pool_mapping=[[0, 1], [1, 1]]))
    targets = [
        (100, 10),
        (100, 150),
        (2000, 10),
        (2000, 150),
        (None, 10),
        (100, None),
        (None, None),
        (0, 0),
        (1e4, 1e3),
    ]
    pools = [select_pool(plan, point(ttft_ms=ttft_ms, itl_ms=itl_ms)).pool for ttft_ms, itl_ms in targets]
    assert pools == [0, 1, 1, 1, 1, 1, 1, 0, 1]


def test_three_by_three_grid_routes_as_documented(tmp_path: Path) -> None:
    content = aggregated(
        ttft_min_ms=10,
        ttft_max_ms=3010,
        ttft_resolution=3,
        itl_min_ms=10,
        itl_max_ms=100,
        itl_resolution=3,
        agg_pool_mapping=[[0, 1, 2], [1, 2, 0], [2, 0, 1]],
    )
    content |= {"num_agg_pools": 3, "agg_pool_dynamo_namespaces": ["a", "b", "c"]}
    plan = role_plan(tmp_path, content)
    targets = [(100, 15), (100, 90), (1500, 55), (2500, 15)]
    assert [select_pool(plan, point(ttft_ms=a, itl_ms=b)).pool for a, b in targets] == [0, 2, 2, 2]


def test_optional_prompt_length_axis_selects_aggregated_pools(tmp_path: Path) -> None:
    content = aggregated(isl_min=0, isl_max=24576, isl_resolution=2, ttft_resolution=1, agg_pool_mapping=[[[0]], [[1]]])
    plan = role_plan(tmp_path, content)
    assert [axis.name for axis in plan.grid.axes] == ["length", "ttft_ms", "itl_ms"]
    assert [select_pool(plan, point(length=length)).pool for length in (4096, 16384)] == [0, 1]


def test_overrides_route_as_documented(tmp_path: Path) -> None:
    rule = {"min_priority": 10, "max_priority": 100, "target_pool": 1}
    content = changed(TWO_BY_TWO, "prefill_pool_selection_strategy.priority_overrides", [rule])
    plan = role_plan(tmp_path, content, "prefill")
    assert plan.overrides == (Override(10, 100, 1),)
    request = point(length=100, ttft_ms=50)
    pools = [select_pool(plan, request, priority).pool for priority in (50, None, 5, 10, 100, 9, 101)]
    assert pools == [1, 0, 0, 1, 1, 0, 0]


def test_retry_order_is_as_documented(tmp_path: Path) -> None:
    content = aggregated(ttft_resolution=1, agg_pool_mapping=[[0]])
    content |= {
        "enable_priority_retry": True,
        "num_agg_pools": 3,
        "agg_pool_dynamo_namespaces": ["agg-slow", "agg-fast", "agg-mid"],
        "agg_pool_priorities": [10, 0, 5],
    }
    plan = read(tmp_path, content).plan
    assert plan.retry == Retry(faster=True)
    role = plan.roles["aggregated"]
    order = retry_order(role.pools, select_pool(role, point()).pool, plan.retry)
    assert [role.pools[n].name for n in order] == ["agg-slow", "agg-mid", "agg-fast"]


def test_unknown_keys_are_ignored_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = aggregated(note="x") | {"comment": "x", "$schema": 1}
    assert read(tmp_path, content) == read(tmp_path, AGGREGATED)
    [record] = caplog.records
    ignored = "$schema, comment, agg_pool_selection_strategy.note"
    assert record.getMessage() == f"{tmp_path / 'router.json'}: ignoring unknown keys: {ignored}"


STRATEGY = "prefill_pool_selection_strategy"


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        ("mode", "both", "mode: 'both' is not one of disagg, agg"),
        ("mode", "agg", "agg_pool_selection_strategy: missing"),
        ("enable_priority_retry", 1, "enable_priority_retry: expected a boolean, got an integer"),
        ("num_prefill_pools", MISSING, "num_prefill_pools: missing"),
        ("num_prefill_pools", True, "num_prefill_pools: expected an integer, got a boolean"),
        ("num_prefill_pools", 3, "prefill_pool_dynamo_namespaces: has 2 entries, num_prefill_pools is 3"),
        ("prefill_pool_dynamo_namespaces", MISSING, "prefill_pool_dynamo_namespaces: missing"),
        (
            "prefill_pool_dynamo_namespaces",
            [],
            "prefill_pool_dynamo_namespaces: is empty"
            "; prefill_pool_dynamo_namespaces: has 0 entries, num_prefill_pools is 2",
        ),
        ("prefill_pool_dynamo_namespaces", "a", "prefill_pool_dynamo_namespaces: expected a list, got a string"),
        ("prefill_pool_dynamo_namespaces.1", 7, "prefill_pool_dynamo_namespaces[1]: expected a string, got an integer"),
        (
            "prefill_pool_dynamo_namespaces.1",
            "${NS}-pool",
            "prefill_pool_dynamo_namespaces[1]: may only contain lowercase letters, digits, - and _",
        ),
        (
            "prefill_pool_dynamo_namespaces.1",
            "gp-prefill-0",
            'prefill_pool_dynamo_namespaces[1]: the name "gp-prefill-0" is already used by'
            " prefill_pool_dynamo_namespaces[0]",
        ),
        ("prefill_pool_priorities", [0], "prefill_pool_priorities: has 1 entry for 2 pools"),
        (
            "prefill_pool_priorities",
            [0, False],
            "prefill_pool_priorities[1]: expected an integer, got a boolean",
        ),
        (STRATEGY, MISSING, f"{STRATEGY}: missing"),
        (STRATEGY, [], f"{STRATEGY}: expected a mapping, got a list"),
        (f"{STRATEGY}.isl_min", MISSING, f"{STRATEGY}.isl_min: missing"),
        (f"{STRATEGY}.isl_min", 32000, f"{STRATEGY}: isl_min 32000 is not below isl_max 32000"),
        (f"{STRATEGY}.ttft_min_ms", 5000, f"{STRATEGY}: ttft_min_ms 5000 is not below ttft_max_ms 3000"),
        (f"{STRATEGY}.ttft_max_ms", "3 s", f"{STRATEGY}.ttft_max_ms: expected a number, got a string"),
        (
            f"{STRATEGY}.ttft_max_ms",
            float("nan"),
            f"{STRATEGY}: ttft_max_ms is nan; it must be a number up to 1e+12",
        ),
        (f"{STRATEGY}.isl_resolution", 2.5, f"{STRATEGY}.isl_resolution: expected an integer, got a number"),
        (f"{STRATEGY}.prefill_pool_mapping", MISSING, f"{STRATEGY}.prefill_pool_mapping: missing"),
        (
            f"{STRATEGY}.prefill_pool_mapping",
            [[0, 1]],
            f"{STRATEGY}.prefill_pool_mapping: has 1 entry, isl has 2 buckets",
        ),
        (
            f"{STRATEGY}.prefill_pool_mapping.1",
            [0],
            f"{STRATEGY}.prefill_pool_mapping[1]: has 1 entry, ttft has 2 buckets",
        ),
        (
            f"{STRATEGY}.prefill_pool_mapping.1.0",
            5,
            f"{STRATEGY}.prefill_pool_mapping[1][0]: there is no pool 5; pools are numbered from 0 to 1",
        ),
        (
            f"{STRATEGY}.prefill_pool_mapping.1.0",
            "gp-prefill-0",
            f"{STRATEGY}.prefill_pool_mapping[1][0]: must be a pool number",
        ),
        (
            f"{STRATEGY}.prefill_pool_mapping.1.0",
            True,
            f"{STRATEGY}.prefill_pool_mapping[1][0]: must be a pool number",
        ),
        (
            f"{STRATEGY}.priority_overrides",
            [{"min_priority": 20, "max_priority": 5, "target_pool": 1}],
            f"{STRATEGY}.priority_overrides[0]: min 20 is above max 5",
        ),
        (
            f"{STRATEGY}.priority_overrides",
            [{"min_priority": 1, "max_priority": 5, "target_pool": 3}],
            f"{STRATEGY}.priority_overrides[0].target_pool: there is no pool 3; pools are numbered from 0 to 1",
        ),
        (
            f"{STRATEGY}.priority_overrides",
            [{"min_priority": 1, "max_priority": 5}],
            f"{STRATEGY}.priority_overrides[0].target_pool: missing",
        ),
    ],
)
def test_invalid_value_is_reported_with_its_path(tmp_path: Path, at: str, value: object, message: str) -> None:
    assert read_error(tmp_path, changed(TWO_BY_TWO, at, value)) == message


def test_empty_strategy_is_refused(tmp_path: Path) -> None:
    message = read_error(tmp_path, changed(AGGREGATED, "agg_pool_selection_strategy", {}))
    assert message.startswith("agg_pool_selection_strategy.ttft_min_ms: missing; ")


@pytest.mark.parametrize("missing", ["isl_min", "isl_max", "isl_resolution"])
def test_prompt_length_axis_requires_all_its_keys(tmp_path: Path, missing: str) -> None:
    keys = {"isl_min": 0, "isl_max": 10, "isl_resolution": 2}
    keys.pop(missing)
    assert read_error(tmp_path, aggregated(**keys)) == f"agg_pool_selection_strategy.{missing}: missing"


@pytest.mark.parametrize("resolution", [0, -1])
def test_resolution_below_one_is_refused(tmp_path: Path, resolution: int) -> None:
    message = read_error(tmp_path, aggregated(ttft_resolution=resolution))
    start = f"agg_pool_selection_strategy: ttft_resolution is {resolution}; it must be from 1 to 10000"
    assert message.startswith(start)
