"""Which TensorRT-LLM is installed, and the classes that the adapter uses: probed once, before an engine is built."""

import functools
import importlib
from collections.abc import Callable
from typing import cast

import msgspec

from baton.engines.trtllm.library_types import (
    ArgumentsModel,
    LoadVideo,
    Make,
    MakeCollector,
    MakeDisaggregated,
    MakeEncoder,
    MakeGuided,
    MakeHandoffId13,
    MakeLlm,
    MakeLogprob,
    MakeLora,
    MakeSampling,
    MakeScheduling,
    SharedTensors,
)
from baton.errors import ConfigError

# The adapter is checked against recorded facts of these. Before 1.3.0rc22 the id of a handoff is another one.
SUPPORTED = ("1.2.1", "1.3.0rc22", "1.3.0rc23", "1.3.0rc24", "1.3.0rc25")

# The path of each class, without the leading tensorrt_llm.
PATHS = {
    "llm": "llmapi.llm.LLM",
    "autodeploy_llm": "_torch.auto_deploy.llm.LLM",
    "arguments": "llmapi.llm_args.TorchLlmArgs",
    "autodeploy_arguments": "_torch.auto_deploy.llm_args.LlmArgs",
    "kv_cache_config": "llmapi.llm_args.KvCacheConfig",
    "cache_transceiver_config": "llmapi.llm_args.CacheTransceiverConfig",
    "sampling_params": "sampling_params.SamplingParams",
    "guided_decoding_params": "sampling_params.GuidedDecodingParams",
    "disaggregated_params": "disaggregated_params.DisaggregatedParams",
    "scheduling_params": "scheduling_params.SchedulingParams",
    "lora_request": "executor.request.LoRARequest",
    "logprob": "executor.result.Logprob",
    "request_error": "executor.utils.RequestError",
    "metrics_collector": "metrics.collector.MetricsCollector",
    "encoder": "llmapi.mm_encoder.MultimodalEncoder",
    "shared_tensors": "_torch.shared_tensor.shared_tensor.SharedTensorContainer",
    "load_video": "inputs.utils.load_video",
}
PATHS_13 = {
    "engine_dead_error": "executor.utils.EngineDeadError",
    "new_handoff_id": "llmapi.disagg_utils.get_global_disagg_request_id",
}


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between the versions."""

    version: str
    priority: bool  # requests have one
    sampler_options: bool  # the default sampler has penalties, min_p and seeds; before, it ignores them
    zero_logprobs: bool  # 0 is the chosen token only; before, 0 is off
    thinking_budget: bool
    handoff_ids: bool  # a handoff has an id that is unique among workers, and log-probabilities
    kv_capacity: bool  # there is a call for the size of the KV cache; before, it is in the statistics of an iteration
    health_check: bool
    iteration_metrics: bool
    preprocessing: bool  # media are preprocessed by a call of its own; before, while a request is submitted


class Library(msgspec.Struct, frozen=True, kw_only=True):
    """The library, or a double of it: the classes and functions that the adapter uses."""

    features: Features
    llm: MakeLlm
    autodeploy_llm: Callable[[], MakeLlm]
    arguments: ArgumentsModel
    autodeploy_arguments: Callable[[], ArgumentsModel]
    kv_cache_config: Make
    cache_transceiver_config: Make
    sampling_params: MakeSampling
    guided_decoding_params: MakeGuided
    disaggregated_params: MakeDisaggregated
    scheduling_params: MakeScheduling
    lora_request: MakeLora
    logprob: MakeLogprob
    request_error: type[Exception]
    metrics_collector: MakeCollector
    encoder: Callable[[], MakeEncoder]
    shared_tensors: Callable[[], SharedTensors]
    load_video: Callable[[], LoadVideo]
    engine_dead_error: type[Exception] | None
    new_handoff_id: MakeHandoffId13 | None
    tensor: Callable[[list[float]], object]
    rows: Callable[[memoryview, str, int], object]  # a copy of rows as a tensor, by dtype and row size
    gpu_count: Callable[[], int]


def features_of(version: str) -> Features:
    """Return the features of `version`. Raises ConfigError for a version that the adapter does not support."""
    if version.split("+")[0] not in SUPPORTED:
        old, first, *_, last = SUPPORTED
        raise ConfigError(f"TensorRT-LLM {version} is installed; Baton works with {old}, {first} to {last}")
    new = version.startswith("1.3")
    return Features(
        version=version,
        priority=new,
        sampler_options=new,
        zero_logprobs=new,
        thinking_budget=new,
        handoff_ids=new,
        kv_capacity=new,
        health_check=new,
        iteration_metrics=new,
        preprocessing=new,
    )


def load() -> Library:
    """Return the installed library. Takes seconds: call it off the event loop. Raises ConfigError."""
    try:
        root = importlib.import_module("tensorrt_llm")
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise ConfigError(
            f"TensorRT-LLM cannot be imported: {error}; it needs an NVIDIA GPU: pip install 'baton-serve[trtllm]'"
        ) from error
    features = features_of(str(root.__version__))
    # Their imports are large and most engines do not need them, so they are imported when used.
    late = ("autodeploy_llm", "autodeploy_arguments", "encoder", "shared_tensors", "load_video")
    fetched = {name: _fetch(path) for name, path in PATHS.items() if name not in late}
    fetched |= {name: _fetch(path) if features.handoff_ids else None for name, path in PATHS_13.items()}
    fetched |= {name: functools.partial(_fetch, PATHS[name]) for name in late}
    fetched |= {"tensor": torch.tensor, "rows": _copy_rows, "gpu_count": torch.cuda.device_count}
    return _library(features, fetched)


def _copy_rows(data: memoryview, dtype: str, size: int) -> object:
    """Return a tensor with a copy of rows of `size` numbers of type `dtype`. Raises ValueError if they are not."""
    torch = importlib.import_module("torch")
    kinds = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
    if dtype not in kinds:
        raise ValueError(f"{dtype} is none of {', '.join(kinds)}")
    return torch.frombuffer(bytearray(data), dtype=kinds[dtype]).reshape(-1, size)


def _library(features: Features, fetched: dict[str, object]) -> Library:
    make = cast(Callable[..., Library], Library)  # objects fetched by name have no static type
    return make(features=features, **fetched)


def _fetch(path: str) -> object:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(f"tensorrt_llm.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"this TensorRT-LLM has no {path}: {error}") from error
