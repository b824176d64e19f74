"""Which workers a `baton serve` starts, and what it says about them."""

from pathlib import Path

import msgspec
import pytest

from baton.config.load import load
from baton.config.runtime import RuntimeOptions
from baton.config.settings import MAX_PORT, Settings
from baton.errors import ConfigError
from baton.topology.process_specs import describe, joining, lay_out


def test_workers_of_one_kind_are_numbered() -> None:
    places = lay_out(Settings(workers=3, system_port=9000), cores=8)
    assert [place.name for place in places] == ["worker-0", "worker-1", "worker-2"]
    assert [place.variables["BATON_SYSTEM_PORT"] for place in places] == ["9000", "9001", "9002"]
    assert all("BATON_ROLE" not in place.variables for place in places)


def test_prefill_workers_come_first_and_ports_count_through() -> None:
    places = lay_out(Settings(prefill=1, decode=2, system_port=9000), cores=8)
    assert [place.name for place in places] == ["prefill-0", "decode-0", "decode-1"]
    assert [place.variables["BATON_ROLE"] for place in places] == ["prefill", "decode", "decode"]
    assert [place.variables["BATON_SYSTEM_PORT"] for place in places] == ["9000", "9001", "9002"]


@pytest.mark.parametrize(
    ("settings", "threads"),
    [
        (Settings(workers=1), None),
        (Settings(workers=2), "4"),
        (Settings(prefill=1, decode=2), "2"),
        (Settings(prefill=8, decode=8), "1"),
        (
            msgspec.structs.replace(Settings(workers=2), torch=msgspec.structs.replace(Settings().torch, threads=3)),
            None,
        ),
    ],
)
def test_workers_share_the_cores(settings: Settings, threads: str | None) -> None:
    assert {place.variables.get("BATON_TORCH_THREADS") for place in lay_out(settings, cores=8)} == {threads}


def test_without_a_port_each_worker_finds_its_own() -> None:
    assert "BATON_SYSTEM_PORT" not in lay_out(Settings(), cores=1)[0].variables


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (Settings(role="prefill"), "--prefill"),
        (Settings(role="decode"), "baton worker --role decode"),
        (Settings(role="embed", prefill=1, decode=1), "--role embed"),
        (Settings(workers=2, system_port=MAX_PORT), "--system-port"),
    ],
)
def test_what_cannot_be_a_whole_is_refused(settings: Settings, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        lay_out(settings, cores=1)


def test_what_runs_is_said_in_words() -> None:
    assert describe(Settings()) == "1 worker"
    assert describe(Settings(workers=2)) == "2 workers"
    assert describe(Settings(prefill=1, decode=2)) == "1 prefill and 2 decode workers"


def test_the_command_that_adds_a_worker_has_what_is_not_usual() -> None:
    settings = Settings(
        prefill=1, decode=1, model="/models/my model", runtime=RuntimeOptions(directory="/tmp/x"), namespace="mine"
    )
    assert joining(settings) == (
        "baton worker --role decode --model '/models/my model' --namespace mine --runtime-directory /tmp/x"
    )


def test_the_command_that_adds_a_worker_says_what_the_engine_was_told() -> None:
    settings = Settings(engine="sglang", prefill=1, decode=1, engine_args=("--tp-size", "2", "--name", "a b"))
    assert joining(settings) == "baton worker --role decode --engine sglang -- --tp-size 2 --name 'a b'"


def test_encode_workers_come_last_and_the_others_count_on_them() -> None:
    settings = Settings(prefill=1, decode=1, encode=2)
    places = lay_out(settings, cores=8)
    assert [place.name for place in places] == ["prefill-0", "decode-0", "encode-0", "encode-1"]
    assert [place.variables["BATON_MEDIA_ENCODERS"] for place in places] == ["true", "true", "false", "false"]
    assert places[2].variables["BATON_ROLE"] == "encode"
    assert describe(settings) == "1 prefill and 1 decode workers and 2 to encode"
    with pytest.raises(ConfigError, match="give --encode instead"):
        lay_out(Settings(role="encode"), cores=8)


POOLS = """
mode: disaggregated
settings: {torch: {blocks: 64}}
prefill: {pools: [{name: a, workers: {count: 2, settings: {torch: {batch_tokens: 32}}}}]}
decode: {pools: [{name: a, workers: {}}, {name: elsewhere}], mapping: a}
"""


def test_a_topology_starts_a_router_and_the_workers_of_its_pools(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text(POOLS)
    settings = load({"topology": str(file), "system_port": 9000}, {}, None)
    router, *workers = lay_out(settings, cores=8)
    assert (router.name, router.command, router.variables) == ("router", "router run", {"BATON_SYSTEM_PORT": "9000"})
    assert [(place.name, place.command) for place in workers] == [
        ("prefill-a-0", "worker"),
        ("prefill-a-1", "worker"),
        ("decode-a-0", "worker"),
    ]
    own = ("NAMESPACE", "ROLE", "SYSTEM_PORT", "TORCH_BATCH_TOKENS", "TORCH_BLOCKS", "TORCH_THREADS")
    assert [tuple(place.variables[f"BATON_{name}"] for name in own) for place in workers] == [
        ("baton-prefill-a", "prefill", "9001", "32", "64", "2"),
        ("baton-prefill-a", "prefill", "9002", "32", "64", "2"),
        ("baton-decode-a", "decode", "9003", "0", "64", "2"),
    ]
    assert describe(settings) == "3 workers in 2 pools behind a router"


def test_flags_and_variables_win_over_the_settings_of_a_topology(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text(POOLS)
    assert load({}, {"BATON_TOPOLOGY": str(file)}, None).torch.blocks == 64
    assert load({"torch.blocks": 5}, {"BATON_TOPOLOGY": str(file)}, None).torch.blocks == 5
    assert load({}, {"BATON_TOPOLOGY": str(file), "BATON_TORCH_BLOCKS": "6"}, None).torch.blocks == 6


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("{blocks: 64}", "{blocs: 64}"), "unknown setting torch.blocs in settings of"),
        (("batch_tokens: 32", "batch_tokens: -1"), "bad value for torch.batch_tokens"),
        (("workers: {count: 2, settings: {torch: {batch_tokens: 32}}}", "priority: 1"), None),
        (
            ("workers: {count: 2, settings: {torch: {batch_tokens: 32}}}", "workers: {settings: {rol: 1}}"),
            "unknown setting rol",
        ),
    ],
)
def test_what_is_wrong_with_a_topology_is_said_before_anything_starts(
    tmp_path: Path, change: tuple[str, str], problem: str | None
) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text(POOLS.replace(*change))
    if problem is None:
        assert len(lay_out(load({"topology": str(file)}, {}, None), cores=8)) == 2
        return
    with pytest.raises(ConfigError, match=problem):
        lay_out(load({"topology": str(file)}, {}, None), cores=8)


def test_a_topology_says_which_workers_there_are(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text("mode: aggregated\naggregated: {pools: [{name: a}]}")
    with pytest.raises(ConfigError, match="drop --workers"):
        load({"topology": str(file), "workers": 2}, {}, None)
    with pytest.raises(ConfigError, match="says which workers to start"):
        lay_out(load({"topology": str(file)}, {}, None), cores=8)
    with pytest.raises(ConfigError, match="cannot read"):
        load({"topology": str(tmp_path / "none.yaml")}, {}, None)
