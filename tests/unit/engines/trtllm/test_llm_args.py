"""Arguments of the library's engine: defaults, and what is refused before the engine starts."""

import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.config.engines import TrtllmOptions
from baton.engines.echo.engine import MODEL_DIR
from baton.engines.trtllm.adapter import TrtllmEngine
from baton.engines.trtllm.cli_args import read_arguments
from baton.engines.trtllm.compat import load
from baton.engines.trtllm.launch import context_of, make_llm
from baton.engines.trtllm.llm_args import NOT_AUTODEPLOY, RequestType, build_arguments, dp_size, plan_arguments
from baton.errors import ConfigError
from baton.testing import run_bounded
from tests.doubles.trtllm import World, make_library

OPTIONS = TrtllmOptions()


def library(version: str = "1.3.0rc22", world: World | None = None) -> Any:
    return make_library(version, world or World(), CollectorRegistry())


def built(*args: str, request_type: RequestType | None = None, options: TrtllmOptions = OPTIONS) -> dict[str, Any]:
    tree = plan_arguments(options, read_arguments(args), MODEL_DIR, request_type)
    return build_arguments(library(), options, tree)


def test_d29_an_override_changes_only_what_it_names() -> None:
    args = built("--override", '{"kv_cache_config": {"free_gpu_memory_fraction": 0.5}}')
    config = args["kv_cache_config"]
    assert config.free_gpu_memory_fraction == 0.5
    assert config.event_buffer_max_size == OPTIONS.kv_events
    assert config.tokens_per_block == 32, "other fields are the library's defaults"


def test_the_user_sets_the_size_of_the_kv_event_buffer() -> None:
    assert built("--kv_cache_config.event_buffer_max_size=7")["kv_cache_config"].event_buffer_max_size == 7
    assert built(options=TrtllmOptions(kv_events=0))["kv_cache_config"].event_buffer_max_size == 0


@pytest.mark.parametrize("request_type", ["context_only", "generation_only"])
def test_a_disaggregated_engine_has_a_transceiver_with_a_timeout(request_type: RequestType) -> None:
    config = built(request_type=request_type)["cache_transceiver_config"]
    assert config.backend == "DEFAULT"
    assert config.kv_transfer_timeout_ms == 60_000
    own = built("--cache_transceiver_config.backend=NIXL", request_type=request_type)["cache_transceiver_config"]
    assert (own.backend, own.kv_transfer_timeout_ms) == ("NIXL", 60_000)
    assert "cache_transceiver_config" not in built()


@pytest.mark.parametrize(
    ("args", "request_type", "named"),
    [
        (("--model", "elsewhere"), None, "--model"),
        (("--backend", "tensorrt"), None, "--trtllm-backend"),
        (("--enable_iter_perf_stats", "false"), None, "enable_iter_perf_stats"),
        (("--num_postprocess_workers", "2"), None, "num_postprocess_workers"),
        (("--encode_only", "true"), None, "encode_only"),
        (("--cache_transceiver_config", "null"), "generation_only", "cache_transceiver_config"),
        (("--cache_transceiver_config.backend", "null"), "context_only", "cache_transceiver_config.backend"),
    ],
)
def test_arguments_that_contradict_baton_are_refused_by_name(
    args: tuple[str, ...], request_type: RequestType | None, named: str
) -> None:
    with pytest.raises(ConfigError) as error:
        TrtllmEngine(OPTIONS, args, MODEL_DIR, "name", request_type, library())
    assert named in error.value.message


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--no_such_argument", "1"), "no_such_argument"),
        (("--kv_cache_config.no_such_field", "1"), "kv_cache_config.no_such_field"),
        (("--scheduler_config.dynamic_batch_config.nothing", "1"), "scheduler_config.dynamic_batch_config.nothing"),
    ],
)
def test_an_argument_that_the_library_lacks_is_named(args: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        built(*args)
    assert named in error.value.message
    assert built("--model_kwargs.anything.goes", "1")["model_kwargs"] == {"anything": {"goes": 1}}


def test_an_argument_of_one_version_is_refused_by_the_other() -> None:
    tree = plan_arguments(OPTIONS, read_arguments(("--kv_cache_config.disk_cache_size", "1")), MODEL_DIR, None)
    build_arguments(library("1.3.0rc22"), OPTIONS, tree)
    with pytest.raises(ConfigError, match=r"TensorRT-LLM 1\.2\.1 has no argument kv_cache_config\.disk_cache_size"):
        build_arguments(library("1.2.1"), OPTIONS, tree)


def test_autodeploy_drops_arguments_that_it_lacks_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    options = TrtllmOptions(backend="_autodeploy")
    args = [f"--{name}={1}" for name in NOT_AUTODEPLOY]
    with caplog.at_level(logging.WARNING):
        tree = plan_arguments(options, read_arguments((*args, "--max_batch_size=2")), MODEL_DIR, None)
    (record,) = caplog.records
    assert all(name in record.getMessage() for name in NOT_AUTODEPLOY)
    assert tree["max_batch_size"] == 2
    assert not set(NOT_AUTODEPLOY) & set(tree)


def test_a_machine_without_a_gpu_is_a_config_error() -> None:
    tree = plan_arguments(OPTIONS, {}, MODEL_DIR, None, context=64)
    with pytest.raises(ConfigError, match="NVIDIA GPU"):
        make_llm(library(world=World(gpus=0)), OPTIONS, tree)


def test_a_missing_library_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        load()
    with pytest.raises(ConfigError, match="cannot be imported"):
        run_bounded(TrtllmEngine(OPTIONS, (), MODEL_DIR, "name").start())


def test_the_context_length_is_the_users_or_the_models(caplog: pytest.LogCaptureFixture) -> None:
    assert context_of({}, 512, MODEL_DIR) == 512
    assert context_of({"max_seq_len": 99}, 512, MODEL_DIR) == 99
    with pytest.raises(ConfigError, match="max_seq_len"):
        context_of({}, None, MODEL_DIR)
    with pytest.raises(ConfigError, match="max_seq_len"):
        context_of({"max_seq_len": "long"}, None, MODEL_DIR)
    assert not caplog.records
    context_of({"max_seq_len": 9000}, None, MODEL_DIR)
    assert "enable_chunked_prefill" in caplog.text


def test_dp_size_is_known_before_the_engine_starts() -> None:
    assert dp_size({"tensor_parallel_size": 8}) == 1
    assert dp_size({"tensor_parallel_size": 8, "enable_attention_dp": True}) == 8
    args = ("--tensor_parallel_size=4", "--enable_attention_dp=true")
    assert TrtllmEngine(OPTIONS, args, MODEL_DIR, "name", None, library()).capabilities.dp_size == 4
