"""Router files of our layout: what they mean, and one line with the place for everything that is wrong."""

import json
import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.errors import ConfigError
from baton.router.grid import Axis, Grid
from baton.router.plan import Aggregated, Disaggregated, Override, Part, Plan, Pool, Retry
from baton.router.topology_file import Blueprint, Group, read_blueprint

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
GONE = object()


def read(tmp_path: Path, content: object, name: str = "pools.yaml") -> Blueprint:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return read_blueprint(path, "baton")


def refusal(tmp_path: Path, content: object, name: str = "pools.yaml") -> str:
    """Return what is said of a file that is wrong, without the file's name in front."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content, name)
    assert "\n" not in caught.value.message
    return caught.value.message.removeprefix(f"{tmp_path / name}: ")


def changed(place: str, value: object) -> dict[str, Any]:
    """Return the small file with another value at `place`, keys and numbers with dots between."""
    tree = deepcopy(SMALL)
    *transport, last = [int(word) if word.isdigit() else word for word in place.split(".")]
    inner: Any = tree
    for word in transport:
        inner = inner[word]
    if value is GONE:
        del inner[last]
    else:
        inner[last] = value
    return tree


def test_every_key_has_its_meaning(tmp_path: Path) -> None:
    prefill = Part(
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
    decode = Part(pools=(Pool(name="all", path="baton-decode-all.elsewhere.answer", priority=0),), grid=Grid((), (0,)))
    assert read(tmp_path, FULL) == Blueprint(
        plan=Plan(
            mode=Disaggregated(prefill, decode),
            ttft_ms=500,
            itl_ms=0,
            retry=Retry(others=True),
            adaptive=True,
        ),
        groups=(Group(part="prefill", pool="short", namespace="my-ns", count=2, settings={"torch": {"threads": 1}}),),
        settings={"kv": {"handoff": "late"}},
    )


def test_json_of_the_same_layout_means_the_same(tmp_path: Path) -> None:
    assert read(tmp_path, json.dumps(yaml.safe_load(FULL)), "pools.json") == read(tmp_path, FULL)


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    blueprint = read(tmp_path, "mode: aggregated\naggregated: {pools: [{name: a, workers: {}}]}")
    pool = Pool(name="a", path="baton-a.worker.generate", priority=0)
    part = Part(pools=(pool,), grid=Grid((), (0,)))
    assert blueprint == Blueprint(
        plan=Plan(mode=Aggregated(part), retry=Retry(faster=True)),
        groups=(Group(part="aggregated", pool="a", namespace="baton-a", count=1, settings={}),),
        settings={},
    )


def test_a_pools_priority_is_its_number_unless_it_has_one(tmp_path: Path) -> None:
    text = "mode: aggregated\naggregated: {pools: [{name: a}, {name: b, priority: 0}, {name: c}], mapping: c}"
    assert [pool.priority for pool in read(tmp_path, text).plan.parts["aggregated"].pools] == [0, 0, 2]


def test_null_is_as_good_as_nothing(tmp_path: Path) -> None:
    text = "mode: aggregated\nretry:\nsettings:\ndecode:\naggregated: {pools: [{name: a, priority: null}], overrides: }"
    assert read(tmp_path, text) == read(tmp_path, "mode: aggregated\naggregated: {pools: [{name: a}]}")


def test_without_axes_all_requests_go_to_one_pool_and_overrides_still_count(tmp_path: Path) -> None:
    text = "pools: [{name: a}, {name: b}], mapping: b, overrides: [{min: 1, max: 1, pool: a}]"
    part = read(tmp_path, f"{{mode: aggregated, aggregated: {{{text}}}}}").plan.parts["aggregated"]
    assert part.grid == Grid((), (1,))
    assert part.overrides == (Override(1, 1, 0),)


def test_axes_are_in_the_order_of_the_file(tmp_path: Path) -> None:
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
    grid = read(tmp_path, text).plan.parts["aggregated"].grid
    assert [axis.name for axis in grid.axes] == ["itl_ms", "context", "ttft_ms"]
    assert grid.pool_of((0, 1, 0)) == 1


WRONG = [
    ("mode", GONE, "mode: missing"),
    ("mode", "both", "mode: 'both' is none of disaggregated, aggregated"),
    ("mode", 3, "mode: expected text, got a whole number"),
    ("moed", 1, "moed: unknown key"),
    ("retry", {"fast": True}, "retry.fast: unknown key"),
    ("retry", {"faster": 1}, "retry.faster: expected true or false, got a whole number"),
    ("retry", [], "retry: expected a mapping, got a list"),
    ("adaptive", "yes please", "adaptive: expected true or false, got text"),
    ("defaults", {"ttft_ms": True}, "defaults.ttft_ms: expected a number, got true or false"),
    ("defaults", {"ttft_ms": -1}, "defaults.ttft_ms: expected a number >= 0.0"),
    ("defaults", {"itl_ms": float("inf")}, "defaults.itl_ms: expected a number <= 1000000000000.0"),
    ("defaults", {"itl_ms": float("nan")}, "defaults.itl_ms: expected a number >= 0.0"),
    ("settings", [1], "settings: expected a mapping, got a list"),
    ("settings", {1: 2}, "settings: keys must be text"),
    ("decode", GONE, "decode: missing"),
    ("decode", "one", "decode: expected a mapping, got text"),
    ("aggregated", {"pools": []}, "aggregated: mode disaggregated has no such part"),
    ("prefill.pools", GONE, "prefill.pools: missing"),
    ("prefill.pools", {}, "prefill.pools: expected a list, got a mapping"),
    ("prefill.pools", [], "prefill.pools: expected a list of length >= 1"),
    ("prefill.pols", [], "prefill.pols: unknown key"),
    ("prefill.pools.1", "slow", "prefill.pools[1]: expected a mapping, got text"),
    ("prefill.pools.1.name", GONE, "prefill.pools[1].name: missing"),
    ("prefill.pools.1.name", False, "prefill.pools[1].name: expected text, got true or false"),
    ("prefill.pools.1.name", "Slow", "prefill.pools[1].name: must be made of small letters, digits, - and _"),
    ("prefill.pools.1.speed", 1, "prefill.pools[1].speed: unknown key"),
    ("prefill.pools.1.namespace", "a.b", "prefill.pools[1].namespace: must be made of small letters, digits, - and _"),
    ("prefill.pools.1.name", "slow\n", "prefill.pools[1].name: must be made of small letters, digits, - and _"),
    (
        "prefill.pools.1.endpoint",
        "generate",
        "prefill.pools[1].endpoint: must be two words with a dot between, made of small letters, digits, - and _",
    ),
    ("prefill.pools.1.priority", True, "prefill.pools[1].priority: expected a whole number, got true or false"),
    ("prefill.pools.1.priority", 1.5, "prefill.pools[1].priority: expected a whole number, got a number"),
    ("prefill.pools.1.queue_limit", 0, "prefill.pools[1].queue_limit: expected a whole number >= 1"),
    ("prefill.pools.1.spread", "even", "prefill.pools[1].spread: 'even' is none of round-robin, kv"),
    ("prefill.pools.1.block_size", 0, "prefill.pools[1].block_size: expected a whole number >= 1"),
    ("prefill.pools.1.workers", 2, "prefill.pools[1].workers: expected a mapping, got a whole number"),
    ("prefill.pools.1.workers", {"count": 0}, "prefill.pools[1].workers.count: expected a whole number >= 1"),
    (
        "prefill.pools.1.workers",
        {"settings": 1},
        "prefill.pools[1].workers.settings: expected a mapping, got a whole number",
    ),
    (
        "prefill.pools",
        [{"name": "fast"}, {"name": "slow"}, {"name": "slow", "namespace": "other"}],
        'prefill.pools[2]: "slow" is the name of prefill.pools[1] already',
    ),
    (
        "prefill.pools.1.namespace",
        "baton-prefill-fast",
        "prefill.pools[1]: baton-prefill-fast.prefill.generate is where prefill.pools[0] is already",
    ),
    (
        "prefill.pools.1.namespace",
        "baton",
        'prefill.pools[1]: "baton" is the router\'s own namespace, whose frontend would pass the router by',
    ),
    (
        "decode.pools.0.endpoint",
        "elsewhere.generate",
        "decode.pools[0].endpoint: workers started from this file are at decode.generate; drop it, or workers",
    ),
    ("prefill.axes", {}, "prefill.axes: expected a list, got a mapping"),
    ("prefill.axes.0.name", "isl", "prefill.axes[0].name: 'isl' is none of length, context, ttft_ms, itl_ms"),
    ("prefill.axes.1.name", "length", "prefill.axes[1].name: length is an axis already"),
    ("prefill.axes.0", 5, "prefill.axes[0]: expected a mapping, got a whole number"),
    ("prefill.axes.0.min", GONE, "prefill.axes[0].min: missing"),
    ("prefill.axes.0.step", 1, "prefill.axes[0].step: unknown key"),
    ("prefill.axes.0.min", "0", "prefill.axes[0].min: expected a number, got text"),
    ("prefill.axes.0.min", False, "prefill.axes[0].min: expected a number, got true or false"),
    ("prefill.axes.0.min", 10, "prefill.axes[0]: min 10 is not below max 10"),
    ("prefill.axes.0.min", 10.5, "prefill.axes[0]: min 10.5 is not below max 10"),
    ("prefill.axes.0.min", float("nan"), "prefill.axes[0]: min is nan, and must be a number up to 1e+12"),
    ("prefill.axes.0.max", float("inf"), "prefill.axes[0]: max is inf, and must be a number up to 1e+12"),
    ("prefill.axes.0.max", 10**400, "prefill.axes[0].max: number out of range"),
    ("prefill.axes.0.max", 5e-324, "prefill.axes[0]: too narrow for 2 buckets"),
    ("prefill.axes.0.buckets", True, "prefill.axes[0].buckets: expected a whole number, got true or false"),
    ("prefill.axes.0.buckets", 2.5, "prefill.axes[0].buckets: expected a whole number, got a number"),
    ("prefill.mapping", GONE, "prefill.mapping: missing"),
    ("prefill.mapping", "fast", "prefill.mapping: must be a list with an entry for each of the 2 buckets of length"),
    ("prefill.mapping.1", 0, "prefill.mapping[1]: must be a list with an entry for each of the 3 buckets of ttft_ms"),
    ("prefill.mapping.1", [0, 1], "prefill.mapping[1]: has 2 entries, ttft_ms has 3 buckets"),
    ("prefill.mapping.1", GONE, "prefill.mapping: has 1 entry, length has 2 buckets"),
    ("prefill.mapping.1.0", "fst", 'prefill.mapping[1][0]: no pool is called "fst"; there are: fast, slow'),
    ("prefill.mapping.1.0", 2, "prefill.mapping[1][0]: there is no pool 2; pools are numbered from 0 to 1"),
    ("prefill.mapping.1.0", -1, "prefill.mapping[1][0]: there is no pool -1; pools are numbered from 0 to 1"),
    ("prefill.mapping.1.0", 1.0, "prefill.mapping[1][0]: must be a pool's name or number"),
    ("prefill.mapping.1.0", None, "prefill.mapping[1][0]: must be a pool's name or number"),
    ("prefill.mapping.1.0", False, "prefill.mapping[1][0]: a pool's name must be quoted if YAML takes it for false"),
    ("prefill.mapping.1.0", [0], "prefill.mapping[1][0]: is a list, but there is no axis for it"),
    ("prefill.overrides", {}, "prefill.overrides: expected a list, got a mapping"),
    ("prefill.overrides.0.pool", GONE, "prefill.overrides[0].pool: missing"),
    (
        "prefill.overrides.0.pool",
        True,
        "prefill.overrides[0].pool: expected a pool's name or number, got true or false",
    ),
    ("prefill.overrides.0.pool", "fst", 'prefill.overrides[0].pool: no pool is called "fst"; there are: fast, slow'),
    ("prefill.overrides.0.min", 3, "prefill.overrides[0]: min 3 is above max 2"),
    ("prefill.overrides.0.max", "9", "prefill.overrides[0].max: expected a whole number, got text"),
    ("prefill.overrides.0.to", 9, "prefill.overrides[0].to: unknown key"),
]


@pytest.mark.parametrize(("place", "value", "message"), WRONG)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, place: str, value: object, message: str) -> None:
    assert refusal(tmp_path, changed(place, value)) == message


@pytest.mark.parametrize("buckets", [0, -1, 10_001])
def test_buckets_are_at_least_one_and_not_absurdly_many(tmp_path: Path, buckets: int) -> None:
    expected = f"prefill.axes[0]: buckets is {buckets}, and must be from 1 to 10000"
    assert refusal(tmp_path, changed("prefill.axes.0.buckets", buckets)).startswith(expected)


def test_axes_without_a_mapping_are_refused_even_for_one_pool(tmp_path: Path) -> None:
    axes = [{"name": "length", "min": 0, "max": 1, "buckets": 1}]
    assert refusal(tmp_path, changed("decode.axes", axes)) == "decode.mapping: missing"


def test_a_mapping_without_axes_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, changed("prefill.axes", [])) == "prefill.mapping: is a list, but there is no axis for it"


def test_problems_are_reported_together_and_not_without_end(tmp_path: Path) -> None:
    tree = changed("prefill.axes.0.min", 10)
    tree["prefill"]["mapping"][1] = ["a", "b", "c"]
    tree["prefill"]["overrides"][0]["min"] = 3
    assert refusal(tmp_path, tree) == (
        "prefill.axes[0]: min 10 is not below max 10"
        '; prefill.mapping[1][0]: no pool is called "a"; there are: fast, slow'
        '; prefill.mapping[1][1]: no pool is called "b"; there are: fast, slow'
        '; prefill.mapping[1][2]: no pool is called "c"; there are: fast, slow'
        "; and 1 more"
    )


def test_problems_of_both_parts_are_reported_together(tmp_path: Path) -> None:
    tree = changed("prefill.pools.0.name", 1)
    tree["decode"]["pools"][0]["name"] = 2
    message = refusal(tmp_path, tree)
    assert "prefill.pools[0].name: " in message
    assert "decode.pools[0].name: " in message


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("pools.yaml", "mode: [", "pools.yaml is not valid YAML: "),
        ("pools.json", "{'mode': 1}", "pools.json is not valid JSON: "),
        ("pools.yaml", "mode: a\nmode: b", "pools.yaml is not valid YAML: mode is given twice"),
        ("pools.yaml", "a: {b: 1, c: 2, b: 3}", "pools.yaml is not valid YAML: b is given twice"),
        ("pools.json", '{"a": [{"b": 1, "b": 2}]}', "pools.json is not valid JSON: b is given twice"),
        ("pools.yaml", "", "pools.yaml must hold a mapping"),
        ("pools.yaml", "- 1", "pools.yaml must hold a mapping"),
        ("pools.yaml", "1: 2", "pools.yaml must hold a mapping"),
        ("pools.yaml", "[" * 100_000, "pools.yaml is not valid YAML: "),
    ],
)
def test_a_file_that_holds_no_mapping_is_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    assert words in refusal(tmp_path, text, name)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.yaml: No such file or directory"):
        read_blueprint(tmp_path / "nowhere.yaml", "baton")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match=r"bytes\.yaml is not valid YAML"):
        read_blueprint(tmp_path / "bytes.yaml", "baton")


def test_merged_mappings_of_yaml_may_say_otherwise(tmp_path: Path) -> None:
    text = """
mode: aggregated
aggregated:
  pools: [&first {name: a, priority: 1, spread: kv}, {<<: *first, name: b}]
  mapping: a
  overrides: [{min: 0, max: 0, pool: b}]
"""
    pools = read(tmp_path, text).plan.parts["aggregated"].pools
    assert [(pool.name, pool.priority, pool.spread) for pool in pools] == [("a", 1, "kv"), ("b", 1, "kv")]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("prefill.mapping", [["fast"] * 3] * 2),  # an override leads to slow
        ("prefill.overrides", []),
        ("prefill.mapping", [["slow"] * 3] * 2),  # a retry leads to fast
        ("retry", {"faster": False}),
    ],
)
def test_pools_that_something_leads_to_are_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str, value: object
) -> None:
    read(tmp_path, changed(place, value))
    assert caplog.text == ""


def test_a_pool_that_nothing_leads_to_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = changed("prefill.mapping", [["fast"] * 3] * 2)
    tree["prefill"]["overrides"] = [{"min": 0, "max": 9, "pool": "fast"}, {"min": 1, "max": 2, "pool": "slow"}]
    read(tmp_path, tree)
    path = tmp_path / "pools.yaml"
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, f"{path}: prefill.overrides[1]: never used, for one before it has the same priorities"),
        (logging.WARNING, f"{path}: prefill: no request can reach slow"),
    ]


def test_a_pool_that_only_retries_among_others_lead_to_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = changed("prefill.mapping", [["fast"] * 3] * 2)
    tree["prefill"]["overrides"] = []
    read(tmp_path, tree)
    assert "no request can reach slow" in caplog.text
    caplog.clear()
    read(tmp_path, tree | {"retry": {"others": True}})
    assert caplog.text == ""
