"""The double as the adapter gets it: classes with the members in the facts of a version, around the double's engine."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from baton.engines.trtllm.compat import Library, features_of
from baton.models.directory import read_config
from tests.doubles.trtllm.cache import BlockCache
from tests.doubles.trtllm.encoder import EncoderState, SharedTensors
from tests.doubles.trtllm.engine import DoubleEngine
from tests.doubles.trtllm.processor import Processor, load_video, make_rows
from tests.doubles.trtllm.results import ResultState
from tests.doubles.trtllm.world import World
from tests.doubles.trtllm_facts import Bound, NotInFacts, VersionFacts, fact_class, load_facts

MAX_NUM_TOKENS = 8192


class RequestError(RuntimeError):
    """One request has failed."""


class EngineDeadError(RuntimeError):
    """The engine has died; every later call raises it."""

    def __init__(self, root_cause: object = None) -> None:
        super().__init__(f"engine is dead: {root_cause}")


def is_greedy(sampling: Any) -> bool:
    """Whether sampling is greedy, by the library's rule."""
    unset = sampling.temperature is None and sampling.top_p is None and sampling.top_k is None
    return bool(unset or sampling.top_k == 1 or sampling.top_p == 0.0 or sampling.temperature == 0)


class _Classes:
    """The classes of one version."""

    def __init__(self, facts: VersionFacts) -> None:
        self.facts = facts
        self.new = not facts.version.startswith("1.2")
        self.output = fact_class(facts, "executor.result.CompletionOutput")
        self.disaggregated = fact_class(facts, "disaggregated_params.DisaggregatedParams")
        self.logprob = fact_class(facts, "executor.result.Logprob")
        self.request_error = RequestError
        self.is_greedy = is_greedy
        self._numbers = itertools.count(2048)

    def dead_error(self) -> Exception:
        """Return what a dead engine raises."""
        return EngineDeadError("killed") if self.new else RuntimeError("MPI worker died")

    def handoff_params(
        self, request: Any, key: bytes | None, endpoint: str | None, token: int, logprobs: list[Any] | None
    ) -> object:
        """Return the parameters that a prefill returns for the decode."""
        fields: dict[str, object] = {
            "request_type": "context_only",
            "first_gen_tokens": [token],
            "ctx_request_id": next(self._numbers),
            "opaque_state": key,
        }
        if self.new:
            fields |= {
                "disagg_request_id": request.params.disagg_request_id,
                "first_gen_log_probs": logprobs,
                "ctx_dp_rank": 0,
                "ctx_info_endpoint": endpoint,
            }
        return self.disaggregated(**fields)

    def sampling(self, **fields: Any) -> Any:
        """Return SamplingParams, with the library's checks."""
        params: Any = fact_class(self.facts, "sampling_params.SamplingParams")(**fields)
        params.best_of = params.best_of or params.n
        if params.top_k is not None and params.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={params.top_k}")
        if params.temperature is not None and params.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={params.temperature}")
        if params.best_of < params.n:
            raise ValueError("best_of must be at least n")
        if params.best_of > 1 and is_greedy(params):
            raise ValueError(f"Greedy decoding does not allow multiple returns, got best_of={params.best_of}")
        return params


class _Executor:
    def __init__(self, engine: DoubleEngine) -> None:
        self._engine = engine

    def is_shutdown(self) -> bool:
        return self._engine.over

    def check_health(self) -> bool:
        return not self._engine.over


class _Shared:
    """What the `_async` polls return: one iterator for all callers, over the items that are left."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if not self.items:
            raise StopAsyncIteration
        return self.items.pop(0)


class _LlmState:
    """Behind a `Bound`."""

    def __init__(self, classes: _Classes, world: World, arguments: dict[str, Any]) -> None:
        config = arguments["kv_cache_config"]
        transceiver = arguments.get("cache_transceiver_config")
        keep_ms = None if transceiver is None else transceiver.kv_transfer_timeout_ms
        size = config.tokens_per_block
        blocks = config.max_tokens // size if config.max_tokens else world.blocks
        windows = (*world.windows, arguments["max_seq_len"])
        self._classes = classes
        self._world = world
        self._arguments = arguments
        self._numbers = itertools.count(1)
        self._moves_kv = transceiver is not None
        self._processor = Processor(Path(arguments["model"]), world, classes.facts)
        cache = BlockCache(blocks, size, windows, config.event_buffer_max_size, classes.new)
        vocabulary = read_config(Path(arguments["model"])).vocab_size
        self._engine = DoubleEngine(
            world,
            classes.new,
            vocabulary,
            cache,
            arguments.get("max_batch_size", 2048),
            (keep_ms or 1e9) / 1000,
            classes,
            _endpoint(transceiver) if classes.new else None,
        )
        self._executor: Bound | None = Bound(
            _Executor(self._engine), classes.facts, "executor.executor.GenerationExecutor"
        )
        self._stats, self._events = _Shared(), _Shared()

    def generate_async(self, **fields: Any) -> Bound:
        """Accept a request."""
        if self._engine.over:
            raise self._engine.death or RuntimeError("LLM is shutting down")
        assert asyncio.get_running_loop(), "results are read on the loop of the call"
        sampling, params = fields["sampling_params"], fields.get("disaggregated_params")
        prompt = self._prompt(fields["inputs"], params)
        limit = self._arguments.get("max_num_tokens", MAX_NUM_TOKENS)
        if params is not None and params.request_type != "context_and_generation" and not self._moves_kv:
            raise ValueError("cache_transceiver_config is needed to move KV")
        if len(prompt) > limit and not self._arguments.get("enable_chunked_prefill"):
            raise RequestError(f"the prompt length ({len(prompt)}) should not exceed max_num_tokens ({limit})")
        result = ResultState(next(self._numbers), prompt, sampling, self._classes.output, self._engine.cancel)
        self._engine.submit(result, sampling, params, fields.get("cache_salt"))
        return Bound(result, self._classes.facts, "llmapi.llm.RequestOutput")

    def preprocess(self, inputs: dict[str, Any], sampling_params: Any = None, disaggregated_params: Any = None) -> Any:
        """Preprocess a prompt with media."""
        assert not sampling_params.add_special_tokens, "the prompt has its special tokens already"
        return self._processor.preprocess(inputs, disaggregated_params)

    def _prompt(self, inputs: Any, params: Any) -> list[int]:
        """Return the prompt as it is computed. The media of one that was preprocessed are read now."""
        if not isinstance(inputs, dict):
            inputs.multimodal_params._bound_inner.to_tensor("multimodal_data")
            return list(inputs.prompt_token_ids)
        assert not inputs.get("multi_modal_data"), "preprocessing blocks the event loop"
        if params is not None and params.multimodal_embedding_handles is not None:
            return self._processor.expand(inputs, params)
        return list(inputs["prompt_token_ids"])

    def get_stats(self, timeout: float = 2) -> list[Any]:
        """Block up to `timeout`, then return the items so far."""
        return self._poll(self._engine.stats, timeout)

    def get_kv_cache_events(self, timeout: float = 2) -> list[Any]:
        """Block up to `timeout`, then return the items so far."""
        return self._poll(self._engine.cache.events, timeout)

    def get_stats_async(self, timeout: float = 2) -> _Shared:
        """Blocks, in spite of its name."""
        self._stats.items += self.get_stats(timeout)
        return self._stats

    def get_kv_cache_events_async(self, timeout: float = 2) -> _Shared:
        """Blocks, in spite of its name."""
        self._events.items += self.get_kv_cache_events(timeout)
        return self._events

    def get_kv_cache_capacity(self) -> dict[str, int]:
        """Return the size of the cache."""
        cache = self._engine.cache
        return {"maxNumBlocks": cache.total, "tokensPerBlock": cache.size, "maxNumTokens": cache.total * cache.size}

    def _check_health(self) -> bool:
        return not self._engine.over

    def shutdown(self) -> None:
        """Shut the engine down."""
        self._engine.shutdown()
        self._executor = None

    def _poll(self, items: Any, timeout: float) -> list[Any]:
        if self._world.poll_errors:
            self._world.poll_errors -= 1
            raise RuntimeError("the RPC has failed")
        return self._engine.wait_for(items, timeout)


def _endpoint(transceiver: Any) -> str | None:
    """Return where the Python transceiver of one engine is asked for KV; None with the C++ one."""
    if transceiver is None or transceiver.transceiver_runtime != "PYTHON":
        return None
    return f"tcp://127.0.0.1:{next(_PORTS)}"


_PORTS = itertools.count(20000)


class _Field:
    def __init__(self, annotation: object) -> None:
        self.annotation = annotation


def _arguments_model(facts: VersionFacts, path: str) -> Any:
    """Return a class with pydantic's `model_fields`; the fields that hold a config name its class."""
    model = fact_class(facts, path)
    configs = {name.rpartition(".")[2]: name for name in facts.content["classes"] if name.startswith("llmapi.llm_args")}

    def annotation(text: str) -> object:
        bare = text.removeprefix("Optional[").rstrip("]")
        return _arguments_model(facts, configs[bare]) | None if bare in configs else text

    fields = {name: _Field(annotation(field[0])) for name, field in facts.fields(path).items()}
    cast(Any, model).model_fields = fields
    return model


def _collector(facts: VersionFacts, registry: CollectorRegistry) -> Any:
    path = "metrics.collector.MetricsCollector"

    class Collector:
        def __init__(self, labels: dict[str, str]) -> None:
            names = list(labels)
            self._labels = labels
            self._done = Counter("trtllm_request_success", "requests", names, registry=registry)

        def log_request_metrics_dict(self, metrics_dict: dict[object, object]) -> None:
            self._done.labels(**self._labels).inc()

        log_metrics_dict = log_request_metrics_dict

        def log_iteration_stats(self, iteration_stats: dict[str, object]) -> None:
            assert "iter" in iteration_stats

    def make(**labels: Any) -> Bound:
        for unknown in labels.keys() - facts.keywords(path):
            raise NotInFacts(f"MetricsCollector of {facts.version} has no {unknown!r}")
        return Bound(Collector(**labels), facts, path)

    return make


def make_library(version: str, world: World, registry: CollectorRegistry = REGISTRY) -> Library:
    """Return a double of `version`, in `world`."""
    facts = load_facts()[version]
    classes = _Classes(facts)
    arguments = _arguments_model(facts, "llmapi.llm_args.TorchLlmArgs")
    autodeploy = _arguments_model(facts, "_torch.auto_deploy.llm_args.LlmArgs")

    def make_llm(model: Any) -> Any:
        def make(**values: Any) -> Bound:
            for unknown in values.keys() - model.model_fields.keys():
                raise ValueError(f"{unknown}: extra inputs are not permitted")
            return Bound(_LlmState(classes, world, values), facts, "llmapi.llm.LLM")

        return make

    def make_encoder(**values: Any) -> Bound:
        for unknown in values.keys() - arguments.model_fields.keys():
            raise ValueError(f"{unknown}: extra inputs are not permitted")
        return Bound(EncoderState(classes, world, values), facts, "llmapi.mm_encoder.MultimodalEncoder")

    def shared_tensors() -> Any:
        return Bound(SharedTensors(world), facts, "_torch.shared_tensor.shared_tensor.SharedTensorContainer")

    def new_id(*, node_id: int, process_id: int) -> int:
        return (time.time_ns() // 1000 << 10 | node_id * 64 + process_id) & (2**63 - 1)

    members: dict[str, Any] = {
        "llm": make_llm(arguments),
        "autodeploy_llm": lambda: make_llm(autodeploy),
        "arguments": arguments,
        "autodeploy_arguments": lambda: autodeploy,
        "kv_cache_config": fact_class(facts, "llmapi.llm_args.KvCacheConfig"),
        "cache_transceiver_config": fact_class(facts, "llmapi.llm_args.CacheTransceiverConfig"),
        "sampling_params": classes.sampling,
        "guided_decoding_params": fact_class(facts, "sampling_params.GuidedDecodingParams"),
        "disaggregated_params": classes.disaggregated,
        "scheduling_params": fact_class(facts, "scheduling_params.SchedulingParams"),
        "lora_request": fact_class(facts, "executor.request.LoRARequest"),
        "logprob": classes.logprob,
        "request_error": RequestError,
        "metrics_collector": _collector(facts, registry),
        "encoder": lambda: make_encoder,
        "shared_tensors": shared_tensors,
        "load_video": lambda: load_video,
        "engine_dead_error": EngineDeadError if classes.new else None,
        "new_handoff_id": new_id if classes.new else None,
        "tensor": list,
        "rows": make_rows,
        "gpu_count": lambda: world.gpus,
    }
    return Library(features=features_of(version), **members)
