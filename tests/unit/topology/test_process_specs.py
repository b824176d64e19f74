"""The processes that `baton serve` starts, and their summary for the terminal."""

from pathlib import Path

import msgspec
import pytest

from baton.config.load import load
from baton.config.runtime import RuntimeOptions
from baton.config.settings import MAX_PORT, Settings
from baton.errors import ConfigError
from baton.topology.process_specs import ProcessPlan, add_worker_command, build_process_specs, describe_workers


def test_workers_are_numbered() -> None:
    specs = build_process_specs(Settings(workers=3, system_port=9000), cores=8)
    assert [spec.name for spec in specs] == ["worker-0", "worker-1", "worker-2"]
    assert [spec.variables["BATON_SYSTEM_PORT"] for spec in specs] == ["9000", "9001", "9002"]
    assert all("BATON_ROLE" not in spec.variables for spec in specs)


def test_prefill_workers_come_first_and_ports_are_consecutive() -> None:
    specs = build_process_specs(Settings(prefill=1, decode=2, system_port=9000), cores=8)
    assert [spec.name for spec in specs] == ["prefill-0", "decode-0", "decode-1"]
    assert [spec.variables["BATON_ROLE"] for spec in specs] == ["prefill", "decode", "decode"]
    assert [spec.variables["BATON_SYSTEM_PORT"] for spec in specs] == ["9000", "9001", "9002"]


@pytest.mark.parametrize(
    ("settings", "threads"),
    [
        (Settings(workers=1), "0"),
        (Settings(workers=2), "4"),
        (Settings(prefill=1, decode=2), "2"),
        (Settings(prefill=8, decode=8), "1"),
        (
            msgspec.structs.replace(Settings(workers=2), torch=msgspec.structs.replace(Settings().torch, threads=3)),
            None,
        ),
    ],
)
def test_cores_are_divided_among_the_workers(settings: Settings, threads: str | None) -> None:
    assert {spec.variables.get("BATON_TORCH_THREADS") for spec in build_process_specs(settings, cores=8)} == {threads}


def test_without_a_system_port_workers_choose_their_own() -> None:
    assert "BATON_SYSTEM_PORT" not in build_process_specs(Settings(), cores=1)[0].variables


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(role="prefill"), "--prefill"),
        (Settings(role="decode"), "baton scale decode=N"),
        (Settings(role="embed", prefill=1, decode=1), "--role embed"),
        (Settings(workers=2, system_port=MAX_PORT), "--system-port"),
    ],
)
def test_conflicting_settings_are_refused(settings: Settings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_process_specs(settings, cores=1)


def test_workers_are_described() -> None:
    assert describe_workers(Settings()) == "1 worker"
    assert describe_workers(Settings(workers=2)) == "2 workers"
    assert describe_workers(Settings(prefill=1, decode=2)) == "1 prefill and 2 decode workers"


def test_command_to_add_a_worker_has_settings_that_differ_from_defaults() -> None:
    settings = Settings(
        prefill=1, decode=1, model="/models/my model", runtime=RuntimeOptions(directory="/tmp/x"), namespace="mine"
    )
    assert add_worker_command(settings) == (
        "baton worker --role decode --model '/models/my model' --namespace mine --runtime-directory /tmp/x"
    )


def test_command_to_add_a_worker_has_the_engine_arguments() -> None:
    settings = Settings(engine="sglang", prefill=1, decode=1, engine_args=("--tp-size", "2", "--name", "a b"))
    assert add_worker_command(settings) == "baton worker --role decode --engine sglang -- --tp-size 2 --name 'a b'"


def test_encode_workers_come_last_and_other_workers_use_them() -> None:
    settings = Settings(prefill=1, decode=1, encode=2)
    specs = build_process_specs(settings, cores=8)
    assert [spec.name for spec in specs] == ["prefill-0", "decode-0", "encode-0", "encode-1"]
    assert [spec.variables["BATON_MEDIA_ENCODERS"] for spec in specs] == ["true", "true", "false", "false"]
    assert specs[2].variables["BATON_ROLE"] == "encode"
    assert describe_workers(settings) == "1 prefill and 1 decode workers and 2 encode workers"
    with pytest.raises(ConfigError, match="give --encode instead"):
        build_process_specs(Settings(role="encode"), cores=8)


POOLS = """
mode: disaggregated
settings: {torch: {blocks: 64}}
prefill: {pools: [{name: a, workers: {count: 2, settings: {torch: {batch_tokens: 32}}}}]}
decode: {pools: [{name: a, workers: {}}, {name: elsewhere}], mapping: a}
"""


def test_topology_starts_a_router_and_the_workers_of_its_pools(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text(POOLS)
    settings = load({"topology": str(file), "system_port": 9000}, {}, None)
    router, *workers = build_process_specs(settings, cores=8)
    assert (router.name, router.command, router.variables) == ("router", "router run", {"BATON_SYSTEM_PORT": "9000"})
    assert [(spec.name, spec.command) for spec in workers] == [
        ("prefill-a-0", "worker"),
        ("prefill-a-1", "worker"),
        ("decode-a-0", "worker"),
    ]
    names = ("NAMESPACE", "ROLE", "SYSTEM_PORT", "TORCH_BATCH_TOKENS", "TORCH_BLOCKS", "TORCH_THREADS")
    assert [tuple(spec.variables[f"BATON_{name}"] for name in names) for spec in workers] == [
        ("baton-prefill-a", "prefill", "9001", "32", "64", "2"),
        ("baton-prefill-a", "prefill", "9002", "32", "64", "2"),
        ("baton-decode-a", "decode", "9003", "0", "64", "2"),
    ]
    assert describe_workers(settings) == "3 workers in 2 pools behind a router"


def test_flags_and_variables_override_the_settings_of_a_topology(tmp_path: Path) -> None:
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
def test_invalid_topology_is_refused_before_processes_start(
    tmp_path: Path, change: tuple[str, str], problem: str | None
) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text(POOLS.replace(*change))
    if problem is None:
        assert len(build_process_specs(load({"topology": str(file)}, {}, None), cores=8)) == 2
        return
    with pytest.raises(ConfigError, match=problem):
        build_process_specs(load({"topology": str(file)}, {}, None), cores=8)


def test_a_pool_whose_name_is_too_long_for_files_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text(POOLS.replace("name: elsewhere", f"name: {'b' * 101}, workers: {{}}"))
    with pytest.raises(ConfigError, match="at most 100 characters"):
        build_process_specs(load({"topology": str(file)}, {}, None), cores=8)


def test_topology_without_workers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text("mode: aggregated\naggregated: {pools: [{name: a}]}")
    with pytest.raises(ConfigError, match="drop --workers"):
        load({"topology": str(file), "workers": 2}, {}, None)
    with pytest.raises(ConfigError, match="has workers to start"):
        build_process_specs(load({"topology": str(file)}, {}, None), cores=8)
    with pytest.raises(ConfigError, match="cannot read"):
        load({"topology": str(tmp_path / "none.yaml")}, {}, None)


def test_process_workers_come_last_and_the_others_are_where_no_frontend_looks() -> None:
    specs = build_process_specs(Settings(prefill=1, decode=1, process=2, namespace="a", system_port=9000), cores=8)
    assert [spec.name for spec in specs] == ["prefill-0", "decode-0", "process-0", "process-1"]
    assert [spec.variables.get("BATON_NAMESPACE") for spec in specs] == ["a-language", "a-language", None, None]
    assert [spec.variables["BATON_ROLE"] for spec in specs] == ["prefill", "decode", "process", "process"]
    assert [spec.variables["BATON_SYSTEM_PORT"] for spec in specs] == ["9000", "9001", "9002", "9003"]


def test_the_namespace_behind_process_workers_can_be_given() -> None:
    settings = Settings(process=1, language_namespace="pool-1")
    assert build_process_specs(settings, cores=8)[0].variables["BATON_NAMESPACE"] == "pool-1"
    assert "--namespace pool-1" in add_worker_command(settings)
    assert describe_workers(Settings(workers=2, process=1)) == "2 workers and 1 process worker"


def test_a_router_and_its_pools_are_behind_process_workers(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text("mode: aggregated\naggregated:\n  pools: [{name: all, workers: {count: 1}}]\n")
    router, worker, process = build_process_specs(Settings(topology=str(file), process=1), cores=8)
    assert router.variables["BATON_NAMESPACE"] == "baton-language"
    assert worker.variables["BATON_NAMESPACE"] == "baton-language-all"
    assert "BATON_NAMESPACE" not in process.variables
    assert (process.variables["BATON_ROLE"], process.command) == ("process", "worker")


def test_a_process_worker_does_not_serve_alone() -> None:
    with pytest.raises(ConfigError, match="give --process instead"):
        build_process_specs(Settings(role="process"), cores=8)


def test_one_more_worker_has_the_lowest_free_number_and_port() -> None:
    plan = ProcessPlan(Settings(prefill=1, decode=3, system_port=9000), cores=8)
    running = [spec for spec in plan.first_specs() if spec.name != "decode-1"]
    added = plan.next_spec(plan.groups["decode"], running)
    assert (added.name, added.variables["BATON_SYSTEM_PORT"]) == ("decode-1", "9002")
    assert added.variables["BATON_ROLE"] == "decode"
    last = plan.next_spec(plan.groups["prefill"], [*running, added])
    assert (last.name, last.variables["BATON_SYSTEM_PORT"]) == ("prefill-1", "9004")


def test_cores_are_divided_again_when_the_number_of_workers_changes() -> None:
    plan = ProcessPlan(Settings(workers=1), cores=8)
    one = plan.first_specs()
    assert plan.threads(one) == {"worker-0": {"BATON_TORCH_THREADS": "0"}}, "all cores"
    two = [*one, plan.next_spec(plan.groups["worker"], one)]
    assert plan.threads(two) == {name: {"BATON_TORCH_THREADS": "4"} for name in ("worker-0", "worker-1")}


def test_without_a_port_for_it_there_is_no_more_worker() -> None:
    plan = ProcessPlan(Settings(system_port=MAX_PORT), cores=8)
    with pytest.raises(ConfigError, match="--system-port"):
        plan.next_spec(plan.groups["worker"], plan.first_specs())
