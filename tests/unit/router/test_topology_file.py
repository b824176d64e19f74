"""Topology files in Baton's format: their meaning, and the error of each invalid value."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.errors import ConfigError
from baton.router.grid import Axis, Grid
from baton.router.plan import Aggregated, Disaggregated, Override, Plan, Pool, Retry, RolePlan
from baton.router.topology_file import TopologyFile, WorkerGroup, read_topology
from tests.unit.router.trees import MISSING, changed

FULL = """
mode: disaggregated
defaults: {ttft_ms: 500, itl_ms: 0}
retry: {faster: false, others: true}
adaptive: true
settings: {kv: {handoff: late}}
prefill:
  pools:
    - name: short
      namespace: my-ns
      endpoint: prefill.generate
      priority: 3
      queue_limit: 32
      spread: kv
      block_size: 64
      workers: {count: 2, settings: {torch: {threads: 1}}}
    - name: long
  axes:
    - {name: length, min: 0, max: 2048, buckets: 2}
    - {name: ttft_ms, min: 50, max: 2050.5, buckets: 2}
  mapping: [[short, 0], [long, short]]
  overrides: [{min: 5, max: 10, pool: long}, {min: 11, max: 11, pool: 0}]
decode:
  pools:
    - name: all
      endpoint: elsewhere.answer
"""
SMALL: dict[str, Any] = {
    "mode": "disaggregated",
    "prefill": {
        "pools": [{"name": "fast"}, {"name": "slow"}],
        "axes": [
            {"name": "length", "min": 0, "max": 10, "buckets": 2},
            {"name": "ttft_ms", "min": 0, "max": 9, "buckets": 3},
        ],
        "mapping": [["fast", "fast", "slow"], [0, 1, 1]],
        "overrides": [{"min": 1, "max": 2, "pool": "slow"}],
    },
    "decode": {"pools": [{"name": "one", "workers": {"count": 1}}]},
}


def read(tmp_path: Path, content: object, name: str = "pools.yaml") -> TopologyFile:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return read_topology(path, "baton")


def read_error(tmp_path: Path, content: object, name: str = "pools.yaml") -> str:
    """Return the error of an invalid file, without the name of the file."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content, name)
    assert "\n" not in caught.value.message
    return caught.value.message.removeprefix(f"{tmp_path / name}: ")


def test_every_key_is_read(tmp_path: Path) -> None:
    prefill = RolePlan(
        pools=(
            Pool(
                name="short",
                path="my-ns.prefill.generate",
                priority=3,
                queue_limit=32,
                spread="kv",
                block_size=64,
            ),
            Pool(name="long", path="baton-prefill-long.prefill.generate", priority=1),
        ),
        grid=Grid((Axis("length", 0, 2048, 2), Axis("ttft_ms", 50, 2050.5, 2)), (0, 0, 1, 0)),
        overrides=(Override(5, 10, 1), Override(11, 11, 0)),
    )
    decode = RolePlan(
        pools=(Pool(name="all", path="baton-decode-all.elsewhere.answer", priority=0),), grid=Grid((), (0,))
    )
    assert read(tmp_path, FULL) == TopologyFile(
        plan=Plan(
            mode=Disaggregated(prefill, decode),
            ttft_ms=500,
            itl_ms=0,
            retry=Retry(others=True),
            adaptive=True,
        ),
        groups=(
            WorkerGroup(role="prefill", pool="short", namespace="my-ns", count=2, settings={"torch": {"threads": 1}}),
        ),
        settings={"kv": {"handoff": "late"}},
    )


def test_json_and_yaml_files_are_equivalent(tmp_path: Path) -> None:
    assert read(tmp_path, json.dumps(yaml.safe_load(FULL)), "pools.json") == read(tmp_path, FULL)


def test_absent_keys_have_defaults(tmp_path: Path) -> None:
    topology = read(tmp_path, "mode: aggregated\naggregated: {pools: [{name: a, workers: {}}]}")
    pool = Pool(name="a", path="baton-a.worker.generate", priority=0)
    plan = RolePlan(pools=(pool,), grid=Grid((), (0,)))
    assert topology == TopologyFile(
        plan=Plan(mode=Aggregated(plan), retry=Retry(faster=True)),
        groups=(WorkerGroup(role="aggregated", pool="a", namespace="baton-a", count=1, settings={}),),
        settings={},
    )


def test_default_priority_of_a_pool_is_its_number(tmp_path: Path) -> None:
    text = "mode: aggregated\naggregated: {pools: [{name: a}, {name: b, priority: 0}, {name: c}], mapping: c}"
    assert [pool.priority for pool in read(tmp_path, text).plan.roles["aggregated"].pools] == [0, 0, 2]


def test_null_counts_as_absent(tmp_path: Path) -> None:
    text = "mode: aggregated\nretry:\nsettings:\ndecode:\naggregated: {pools: [{name: a, priority: null}], overrides: }"
    assert read(tmp_path, text) == read(tmp_path, "mode: aggregated\naggregated: {pools: [{name: a}]}")


def test_without_axes_the_mapping_is_one_pool_and_overrides_apply(tmp_path: Path) -> None:
    text = "pools: [{name: a}, {name: b}], mapping: b, overrides: [{min: 1, max: 1, pool: a}]"
    plan = read(tmp_path, f"{{mode: aggregated, aggregated: {{{text}}}}}").plan.roles["aggregated"]
    assert plan.grid == Grid((), (1,))
    assert plan.overrides == (Override(1, 1, 0),)


def test_axes_keep_the_order_of_the_file(tmp_path: Path) -> None:
    text = """
mode: aggregated
aggregated:
  pools: [{name: a}, {name: b}]
  axes:
    - {name: itl_ms, min: 0, max: 1, buckets: 1}
    - {name: context, min: 0, max: 2, buckets: 2}
    - {name: ttft_ms, min: 0, max: 3, buckets: 1}
  mapping: [[[a], [b]]]
"""
    grid = read(tmp_path, text).plan.roles["aggregated"].grid
    assert [axis.name for axis in grid.axes] == ["itl_ms", "context", "ttft_ms"]
    assert grid.pool_of((0, 1, 0)) == 1


INVALID = [
    ("mode", MISSING, "mode: missing"),
    ("mode", "both", "mode: 'both' is not one of disaggregated, aggregated"),
    ("mode", 3, "mode: expected a string, got an integer"),
    ("moed", 1, "moed: unknown key"),
    ("retry", {"fast": True}, "retry.fast: unknown key"),
    ("retry", {"faster": 1}, "retry.faster: expected a boolean, got an integer"),
    ("retry", [], "retry: expected a mapping, got a list"),
    ("adaptive", "yes please", "adaptive: expected a boolean, got a string"),
    ("defaults", {"ttft_ms": True}, "defaults.ttft_ms: expected a number, got a boolean"),
    ("defaults", {"ttft_ms": -1}, "defaults.ttft_ms: expected a number >= 0.0"),
    ("defaults", {"itl_ms": float("inf")}, "defaults.itl_ms: expected a number <= 1000000000000.0"),
    ("defaults", {"itl_ms": float("nan")}, "defaults.itl_ms: expected a number >= 0.0"),
    ("settings", [1], "settings: expected a mapping, got a list"),
    ("settings", {1: 2}, "settings: keys must be strings"),
    ("decode", MISSING, "decode: missing"),
    ("decode", "one", "decode: expected a mapping, got a string"),
    ("aggregated", {"pools": []}, "aggregated: not allowed with mode disaggregated"),
    ("prefill.pools", MISSING, "prefill.pools: missing"),
    ("prefill.pools", {}, "prefill.pools: expected a list, got a mapping"),
    ("prefill.pools", [], "prefill.pools: expected a list of length >= 1"),
    ("prefill.pols", [], "prefill.pols: unknown key"),
    ("prefill.pools.1", "slow", "prefill.pools[1]: expected a mapping, got a string"),
    ("prefill.pools.1.name", MISSING, "prefill.pools[1].name: missing"),
    ("prefill.pools.1.name", False, "prefill.pools[1].name: expected a string, got a boolean"),
    ("prefill.pools.1.name", "Slow", "prefill.pools[1].name: may only contain lowercase letters, digits, - and _"),
    ("prefill.pools.1.speed", 1, "prefill.pools[1].speed: unknown key"),
    (
        "prefill.pools.1.namespace",
        "a.b",
        "prefill.pools[1].namespace: may only contain lowercase letters, digits, - and _",
    ),
    ("prefill.pools.1.name", "slow\n", "prefill.pools[1].name: may only contain lowercase letters, digits, - and _"),
    (
        "prefill.pools.1.endpoint",
        "generate",
        "prefill.pools[1].endpoint: must be COMPONENT.ENDPOINT, each of lowercase letters, digits, - and _",
    ),
    ("prefill.pools.1.priority", True, "prefill.pools[1].priority: expected an integer, got a boolean"),
    ("prefill.pools.1.priority", 1.5, "prefill.pools[1].priority: expected an integer, got a number"),
    ("prefill.pools.1.queue_limit", 0, "prefill.pools[1].queue_limit: expected an integer >= 1"),
    ("prefill.pools.1.spread", "even", "prefill.pools[1].spread: 'even' is not one of round-robin, kv"),
    ("prefill.pools.1.block_size", 0, "prefill.pools[1].block_size: expected an integer >= 1"),
    ("prefill.pools.1.workers", 2, "prefill.pools[1].workers: expected a mapping, got an integer"),
    ("prefill.pools.1.workers", {"count": 0}, "prefill.pools[1].workers.count: expected an integer >= 1"),
    (
        "prefill.pools.1.workers",
        {"settings": 1},
        "prefill.pools[1].workers.settings: expected a mapping, got an integer",
    ),
    (
        "prefill.pools",
        [{"name": "fast"}, {"name": "slow"}, {"name": "slow", "namespace": "other"}],
        'prefill.pools[2]: the name "slow" is already used by prefill.pools[1]',
    ),
    (
        "prefill.pools.1.namespace",
        "baton-prefill-fast",
        "prefill.pools[1]: the endpoint baton-prefill-fast.prefill.generate is already used by prefill.pools[0]",
    ),
    (
        "prefill.pools.1.namespace",
        "baton",
        'prefill.pools[1]: "baton" is the router\'s own namespace; its frontend would bypass the router',
    ),
    (
        "decode.pools.0.endpoint",
        "elsewhere.generate",
        "decode.pools[0].endpoint: workers started from this file serve decode.generate; remove endpoint or workers",
    ),
    ("prefill.axes", {}, "prefill.axes: expected a list, got a mapping"),
    ("prefill.axes.0.name", "isl", "prefill.axes[0].name: 'isl' is not one of length, context, ttft_ms, itl_ms"),
    ("prefill.axes.1.name", "length", "prefill.axes[1].name: duplicate axis length"),
    ("prefill.axes.0", 5, "prefill.axes[0]: expected a mapping, got an integer"),
    ("prefill.axes.0.min", MISSING, "prefill.axes[0].min: missing"),
    ("prefill.axes.0.step", 1, "prefill.axes[0].step: unknown key"),
    ("prefill.axes.0.min", "0", "prefill.axes[0].min: expected a number, got a string"),
    ("prefill.axes.0.min", False, "prefill.axes[0].min: expected a number, got a boolean"),
    ("prefill.axes.0.min", 10, "prefill.axes[0]: min 10 is not below max 10"),
    ("prefill.axes.0.min", 10.5, "prefill.axes[0]: min 10.5 is not below max 10"),
    ("prefill.axes.0.min", float("nan"), "prefill.axes[0]: min is nan; it must be a number up to 1e+12"),
    ("prefill.axes.0.max", float("inf"), "prefill.axes[0]: max is inf; it must be a number up to 1e+12"),
    ("prefill.axes.0.max", 10**400, "prefill.axes[0].max: number out of range"),
    ("prefill.axes.0.max", 5e-324, "prefill.axes[0]: too narrow for 2 buckets"),
    ("prefill.axes.0.buckets", True, "prefill.axes[0].buckets: expected an integer, got a boolean"),
    ("prefill.axes.0.buckets", 2.5, "prefill.axes[0].buckets: expected an integer, got a number"),
    ("prefill.mapping", MISSING, "prefill.mapping: missing"),
    ("prefill.mapping", "fast", "prefill.mapping: must be a list with an entry for each of the 2 buckets of length"),
    ("prefill.mapping.1", 0, "prefill.mapping[1]: must be a list with an entry for each of the 3 buckets of ttft_ms"),
    ("prefill.mapping.1", [0, 1], "prefill.mapping[1]: has 2 entries, ttft_ms has 3 buckets"),
    ("prefill.mapping.1", MISSING, "prefill.mapping: has 1 entry, length has 2 buckets"),
    ("prefill.mapping.1.0", "fst", 'prefill.mapping[1][0]: there is no pool "fst"; pools: fast, slow'),
    ("prefill.mapping.1.0", 2, "prefill.mapping[1][0]: there is no pool 2; pools are numbered from 0 to 1"),
    ("prefill.mapping.1.0", -1, "prefill.mapping[1][0]: there is no pool -1; pools are numbered from 0 to 1"),
    ("prefill.mapping.1.0", 1.0, "prefill.mapping[1][0]: must be a pool name or number"),
    ("prefill.mapping.1.0", None, "prefill.mapping[1][0]: must be a pool name or number"),
    ("prefill.mapping.1.0", False, "prefill.mapping[1][0]: a pool name that YAML reads as false must be quoted"),
    ("prefill.mapping.1.0", [0], "prefill.mapping[1][0]: is a list, but there is no axis for it"),
    ("prefill.overrides", {}, "prefill.overrides: expected a list, got a mapping"),
    ("prefill.overrides.0.pool", MISSING, "prefill.overrides[0].pool: missing"),
    (
        "prefill.overrides.0.pool",
        True,
        "prefill.overrides[0].pool: expected a pool name or number, got a boolean",
    ),
    ("prefill.overrides.0.pool", "fst", 'prefill.overrides[0].pool: there is no pool "fst"; pools: fast, slow'),
    ("prefill.overrides.0.min", 3, "prefill.overrides[0]: min 3 is above max 2"),
    ("prefill.overrides.0.max", "9", "prefill.overrides[0].max: expected an integer, got a string"),
    ("prefill.overrides.0.to", 9, "prefill.overrides[0].to: unknown key"),
]


@pytest.mark.parametrize(("at", "value", "message"), INVALID)
def test_invalid_value_is_reported_with_its_path(tmp_path: Path, at: str, value: object, message: str) -> None:
    assert read_error(tmp_path, changed(SMALL, at, value)) == message


@pytest.mark.parametrize("buckets", [0, -1, 10_001])
def test_number_of_buckets_is_bounded(tmp_path: Path, buckets: int) -> None:
    expected = f"prefill.axes[0]: buckets is {buckets}; it must be from 1 to 10000"
    assert read_error(tmp_path, changed(SMALL, "prefill.axes.0.buckets", buckets)).startswith(expected)


def test_axes_require_a_mapping_even_for_one_pool(tmp_path: Path) -> None:
    axes = [{"name": "length", "min": 0, "max": 1, "buckets": 1}]
    assert read_error(tmp_path, changed(SMALL, "decode.axes", axes)) == "decode.mapping: missing"


def test_nested_mapping_without_axes_is_refused(tmp_path: Path) -> None:
    assert (
        read_error(tmp_path, changed(SMALL, "prefill.axes", []))
        == "prefill.mapping: is a list, but there is no axis for it"
    )


def test_several_problems_are_reported_together_up_to_a_limit(tmp_path: Path) -> None:
    tree = changed(SMALL, "prefill.axes.0.min", 10)
    tree["prefill"]["mapping"][1] = ["a", "b", "c"]
    tree["prefill"]["overrides"][0]["min"] = 3
    assert read_error(tmp_path, tree) == (
        "prefill.axes[0]: min 10 is not below max 10"
        '; prefill.mapping[1][0]: there is no pool "a"; pools: fast, slow'
        '; prefill.mapping[1][1]: there is no pool "b"; pools: fast, slow'
        '; prefill.mapping[1][2]: there is no pool "c"; pools: fast, slow'
        "; and 1 more"
    )


def test_problems_of_both_roles_are_reported_together(tmp_path: Path) -> None:
    tree = changed(SMALL, "prefill.pools.0.name", 1)
    tree["decode"]["pools"][0]["name"] = 2
    message = read_error(tmp_path, tree)
    assert "prefill.pools[0].name: " in message
    assert "decode.pools[0].name: " in message


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("pools.yaml", "mode: [", "pools.yaml is not valid YAML: "),
        ("pools.json", "{'mode': 1}", "pools.json is not valid JSON: "),
        ("pools.yaml", "mode: a\nmode: b", "pools.yaml is not valid YAML: duplicate key mode"),
        ("pools.yaml", "a: {b: 1, c: 2, b: 3}", "pools.yaml is not valid YAML: duplicate key b"),
        ("pools.json", '{"a": [{"b": 1, "b": 2}]}', "pools.json is not valid JSON: duplicate key b"),
        ("pools.yaml", "", "pools.yaml must contain a mapping"),
        ("pools.yaml", "- 1", "pools.yaml must contain a mapping"),
        ("pools.yaml", "1: 2", "pools.yaml must contain a mapping"),
        ("pools.yaml", "[" * 100_000, "pools.yaml is not valid YAML: "),
    ],
)
def test_file_without_a_mapping_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    assert message in read_error(tmp_path, text, name)


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.yaml: No such file or directory"):
        read_topology(tmp_path / "nowhere.yaml", "baton")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match=r"bytes\.yaml is not valid YAML"):
        read_topology(tmp_path / "bytes.yaml", "baton")


def test_yaml_merge_keys_can_be_overridden(tmp_path: Path) -> None:
    text = """
mode: aggregated
aggregated:
  pools: [&first {name: a, priority: 1, spread: kv}, {<<: *first, name: b}]
  mapping: a
  overrides: [{min: 0, max: 0, pool: b}]
"""
    pools = read(tmp_path, text).plan.roles["aggregated"].pools
    assert [(pool.name, pool.priority, pool.spread) for pool in pools] == [("a", 1, "kv"), ("b", 1, "kv")]


@pytest.mark.parametrize(
    ("at", "value"),
    [
        ("prefill.mapping", [["fast"] * 3] * 2),  # an override selects slow
        ("prefill.overrides", []),
        ("prefill.mapping", [["slow"] * 3] * 2),  # a retry selects fast
        ("retry", {"faster": False}),
    ],
)
def test_reachable_pools_cause_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at: str, value: object
) -> None:
    read(tmp_path, changed(SMALL, at, value))
    assert caplog.text == ""


def test_unreachable_pool_causes_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = changed(SMALL, "prefill.mapping", [["fast"] * 3] * 2)
    tree["prefill"]["overrides"] = [{"min": 0, "max": 9, "pool": "fast"}, {"min": 1, "max": 2, "pool": "slow"}]
    read(tmp_path, tree)
    path = tmp_path / "pools.yaml"
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, f"{path}: prefill.overrides[1]: never used, an earlier override covers its priorities"),
        (logging.WARNING, f"{path}: prefill: no request can reach slow"),
    ]


def test_pool_reachable_only_by_retry_causes_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = changed(SMALL, "prefill.mapping", [["fast"] * 3] * 2)
    tree["prefill"]["overrides"] = []
    read(tmp_path, tree)
    assert "no request can reach slow" in caplog.text
    caplog.clear()
    read(tmp_path, tree | {"retry": {"others": True}})
    assert caplog.text == ""
