"""Arguments of TensorRT-LLM: how they are written, how they merge, and what is refused before anything starts."""

import logging
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.config.engines import TrtllmOptions
from baton.engines.echo.engine import MODEL_DIR
from baton.engines.trtllm.adapter import TrtllmEngine
from baton.engines.trtllm.cli_args import merged, read_arguments
from baton.engines.trtllm.compat import load
from baton.engines.trtllm.help import engine_help
from baton.engines.trtllm.launch import context_of, make_llm
from baton.engines.trtllm.llm_args import NOT_AUTODEPLOY, build_arguments, dp_size, plan_arguments
from baton.errors import ConfigError
from baton.testing import run_bounded
from tests.doubles.trtllm import World, make_library

OPTIONS = TrtllmOptions()


def library(version: str = "1.3.0rc22", world: World | None = None) -> Any:
    return make_library(version, world or World(), CollectorRegistry())


def built(*args: str, part: str = "whole", options: TrtllmOptions = OPTIONS) -> dict[str, Any]:
    tree = plan_arguments(options, read_arguments(args), MODEL_DIR, part)
    return build_arguments(library(), options, tree)


@pytest.mark.parametrize(
    ("args", "tree"),
    [
        (("--max_batch_size", "64"), {"max_batch_size": 64}),
        (("--max_batch_size=64",), {"max_batch_size": 64}),
        (("--max-batch-size=64",), {"max_batch_size": 64}),
        (("--a.b.c", "1.5", "--a.b.d=true"), {"a": {"b": {"c": 1.5, "d": True}}}),
        (("--dtype", "bfloat16"), {"dtype": "bfloat16"}),
        (("--pp_partition", "[3, 5]"), {"pp_partition": [3, 5]}),
        (("--seed", "-1"), {"seed": -1}),
        (("--enable_chunked_prefill",), {"enable_chunked_prefill": True}),
        (("--enable_chunked_prefill", "--dtype=auto"), {"enable_chunked_prefill": True, "dtype": "auto"}),
        (("--name=",), {"name": None}),
        (("--override", '{"a": {"b": 1}}'), {"a": {"b": 1}}),
        ((), {}),
    ],
)
def test_arguments_are_read_as_they_are_written(args: tuple[str, ...], tree: dict[str, Any]) -> None:
    assert read_arguments(args) == tree


def test_flags_win_over_json_and_json_over_yaml_field_by_field(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("kv_cache_config: {dtype: fp8, tokens_per_block: 8, host_cache_size: 1}\nmax_batch_size: 1\n")
    args = (
        "--kv_cache_config.dtype=auto",
        "--override",
        '{"kv_cache_config": {"dtype": "x", "tokens_per_block": 16}}',
        "--config",
        str(file),
    )
    assert read_arguments(args) == {
        "kv_cache_config": {"dtype": "auto", "tokens_per_block": 16, "host_cache_size": 1},
        "max_batch_size": 1,
    }


def test_merging_changes_neither_side() -> None:
    under: dict[str, Any] = {"a": {"b": 1}}
    over: dict[str, Any] = {"a": {"c": 2}}
    assert merged(under, over) == {"a": {"b": 1, "c": 2}}
    assert (under, over) == ({"a": {"b": 1}}, {"a": {"c": 2}})


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("max_batch_size", "64"), "max_batch_size"),
        (("--override",), "--override"),
        (("--config", "--dtype", "auto"), "--config"),
        (("--a..b", "1"), "a..b"),
        (("--x", "[1"), "--x"),
        (("--override", "{"), "--override"),
        (("--override", "[1]"), "--override"),
        (("--config", "no/such/file.yaml"), "no/such/file.yaml"),
    ],
)
def test_what_cannot_be_read_is_named(args: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_arguments(args)
    assert named in error.value.message


def test_a_file_that_is_no_mapping_is_named(tmp_path: Path) -> None:
    for text in ("- 1", "a: [", "3: 4"):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"bad\.yaml"):
            read_arguments(("--config", str(tmp_path / "bad.yaml")))
    (tmp_path / "empty.yaml").write_text("")
    assert read_arguments(("--config", str(tmp_path / "empty.yaml"))) == {}


def test_d29_an_override_changes_only_what_it_names() -> None:
    args = built("--override", '{"kv_cache_config": {"free_gpu_memory_fraction": 0.5}}')
    config = args["kv_cache_config"]
    assert config.free_gpu_memory_fraction == 0.5
    assert config.event_buffer_max_size == OPTIONS.kv_events
    assert config.tokens_per_block == 32, "what nobody names is the library's default"


def test_kv_events_are_kept_in_as_many_as_the_user_says() -> None:
    assert built("--kv_cache_config.event_buffer_max_size=7")["kv_cache_config"].event_buffer_max_size == 7
    assert built(options=TrtllmOptions(kv_events=0))["kv_cache_config"].event_buffer_max_size == 0


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_who_hands_over_has_a_transceiver_that_gives_up_what_nobody_takes(part: str) -> None:
    config = built(part=part)["cache_transceiver_config"]
    assert config.backend == "DEFAULT"
    assert config.kv_transfer_timeout_ms == 60_000
    own = built("--cache_transceiver_config.backend=NIXL", part=part)["cache_transceiver_config"]
    assert (own.backend, own.kv_transfer_timeout_ms) == ("NIXL", 60_000)
    assert "cache_transceiver_config" not in built()


@pytest.mark.parametrize(
    ("args", "part", "named"),
    [
        (("--model", "elsewhere"), "whole", "--model"),
        (("--backend", "tensorrt"), "whole", "--trtllm-backend"),
        (("--enable_iter_perf_stats", "false"), "whole", "enable_iter_perf_stats"),
        (("--num_postprocess_workers", "2"), "whole", "num_postprocess_workers"),
        (("--encode_only", "true"), "whole", "encode_only"),
        (("--cache_transceiver_config", "null"), "decode", "cache_transceiver_config"),
        (("--cache_transceiver_config.backend", "null"), "prefill", "cache_transceiver_config.backend"),
    ],
)
def test_what_contradicts_the_part_says_what_to_change(args: tuple[str, ...], part: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        TrtllmEngine(OPTIONS, args, MODEL_DIR, "name", part, library())
    assert named in error.value.message


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--no_such_argument", "1"), "no_such_argument"),
        (("--kv_cache_config.no_such_field", "1"), "kv_cache_config.no_such_field"),
        (("--scheduler_config.dynamic_batch_config.nothing", "1"), "scheduler_config.dynamic_batch_config.nothing"),
    ],
)
def test_an_argument_that_the_library_has_not_is_named(args: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        built(*args)
    assert named in error.value.message
    assert built("--model_kwargs.anything.goes", "1")["model_kwargs"] == {"anything": {"goes": 1}}


def test_an_argument_of_one_version_is_refused_by_the_other() -> None:
    tree = plan_arguments(OPTIONS, read_arguments(("--kv_cache_config.disk_cache_size", "1")), MODEL_DIR, "whole")
    build_arguments(library("1.3.0rc22"), OPTIONS, tree)
    with pytest.raises(ConfigError, match=r"TensorRT-LLM 1\.2\.1 has no argument kv_cache_config\.disk_cache_size"):
        build_arguments(library("1.2.1"), OPTIONS, tree)


def test_autodeploy_drops_what_it_has_not_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    options = TrtllmOptions(backend="_autodeploy")
    args = [f"--{name}={1}" for name in NOT_AUTODEPLOY]
    with caplog.at_level(logging.WARNING):
        tree = plan_arguments(options, read_arguments((*args, "--max_batch_size=2")), MODEL_DIR, "whole")
    (record,) = caplog.records
    assert all(name in record.getMessage() for name in NOT_AUTODEPLOY)
    assert tree["max_batch_size"] == 2
    assert not set(NOT_AUTODEPLOY) & set(tree)


def test_a_machine_without_a_gpu_is_a_mistake_of_whoever_started_it() -> None:
    tree = plan_arguments(OPTIONS, {}, MODEL_DIR, "whole", context=64)
    with pytest.raises(ConfigError, match="NVIDIA GPU"):
        make_llm(library(world=World(gpus=0)), OPTIONS, tree)


def test_no_library_is_a_mistake_of_whoever_started_it() -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        load()
    with pytest.raises(ConfigError, match="cannot be imported"):
        run_bounded(TrtllmEngine(OPTIONS, (), MODEL_DIR, "name", "whole").start())


def test_a_part_that_the_engine_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="encode"):
        TrtllmEngine(OPTIONS, (), MODEL_DIR, "name", "encode", library())


def test_the_context_is_the_users_or_the_models(caplog: pytest.LogCaptureFixture) -> None:
    assert context_of({}, 512, MODEL_DIR) == 512
    assert context_of({"max_seq_len": 99}, 512, MODEL_DIR) == 99
    with pytest.raises(ConfigError, match="max_seq_len"):
        context_of({}, None, MODEL_DIR)
    with pytest.raises(ConfigError, match="max_seq_len"):
        context_of({"max_seq_len": "long"}, None, MODEL_DIR)
    assert not caplog.records
    context_of({"max_seq_len": 9000}, None, MODEL_DIR)
    assert "enable_chunked_prefill" in caplog.text


def test_ranks_of_attention_are_counted_before_the_engine_starts() -> None:
    assert dp_size({"tensor_parallel_size": 8}) == 1
    assert dp_size({"tensor_parallel_size": 8, "enable_attention_dp": True}) == 8
    args = ("--tensor_parallel_size=4", "--enable_attention_dp=true")
    assert TrtllmEngine(OPTIONS, args, MODEL_DIR, "name", "whole", library()).capabilities.dp_size == 4


def test_help_lists_the_arguments_or_says_why_it_cannot() -> None:
    text = engine_help(OPTIONS, library())
    assert "--kv_cache_config" in text
    assert "--override JSON" in text
    assert "1.3.0rc22" in text
    assert "cannot be listed here" in engine_help(OPTIONS)
