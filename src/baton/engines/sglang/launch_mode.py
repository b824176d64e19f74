"""The mode that SGLang is launched in, the flags for it, and the arguments that conflict with it. Imports no SGLang."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from baton.config.engines import SglangOptions
from baton.engines.sglang.compat import Dialect
from baton.engines.sglang.diffusion import MAX_RUNNING
from baton.errors import ConfigError

PAGE_SIZE = 16


class LaunchMode(NamedTuple):
    """SGLang's own `--disaggregation-mode`, and whether it runs with `--is-embedding` or with `--encoder-only`."""

    disaggregation: Literal["null", "prefill", "decode"] = "null"
    embedding: bool = False
    encoding: bool = False

    @property
    def generates_alone(self) -> bool:
        """Whether this engine computes prompts and generates from them, without a peer."""
        return self.disaggregation == "null" and not self.embedding and not self.encoding


# Arguments that Baton sets, with the setting to use instead.
_SET_BY_BATON = {
    "model_path": "set the model with --model",
    "served_model_name": "set the name with --name",
    "incremental_streaming_output": "Baton sets how tokens are streamed",
    "stream_output": "Baton sets how tokens are streamed",
    "skip_tokenizer_init": "use --no-sglang-guided instead",
    "enable_metrics": "metrics are on unless --no-sglang-metrics",
    "is_embedding": "start the worker with --role embed instead",
    "encoder_only": "start the worker with --role encode instead",
    "schedule_low_priority_values_first": "higher priorities run first on every engine",
}

# Arguments for deployments that the adapter does not drive.
_NOT_SUPPORTED = {
    "grpc_mode": "Baton calls the engine in this process",
    "smg_grpc_mode": "Baton calls the engine in this process",
    "use_ray": "Baton starts the engine's processes itself",
    "language_only": "Baton moves encoded media between workers; use --media-encoders instead",
    "enable_pd_role_switch": "the role of a worker is fixed",
    "checkpoint_engine_wait_weights_before_ready": "a worker is ready when it has its weights",
    "allow_auto_truncate": "prompts that are too long are refused",
}


def refuse_conflicts(mode: LaunchMode, given: Mapping[str, Any], options: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for the first argument that conflicts with `mode` or with Baton, and say what to change.

    `given` has the arguments on the command line by SGLang's field names; `options` has their spelling there.
    """
    for name, problem in _conflicts(mode, given):
        flag = (options or {}).get(name, f"--{name.replace('_', '-')}")
        raise ConfigError(f"{flag}: {problem}")


def own_flags(
    mode: LaunchMode, options: SglangOptions, model_dir: Path, name: str, dialect: Dialect, given: frozenset[str]
) -> tuple[str, ...]:
    """Return the flags that Baton passes. Defaults that the command line overrides are left out."""
    flags = ["--model-path", str(model_dir), "--served-model-name", name, dialect.stream_flag]
    defaults = {"page_size": str(PAGE_SIZE), "log_level": "error"}
    defaults |= {"host": options.host} if options.host else {}
    defaults |= {"max_running_requests": str(MAX_RUNNING)} if "dllm_algorithm" in given else {}
    for field, value in defaults.items():
        if field not in given:
            flags += [f"--{field.replace('_', '-')}", value]
    flags += ["--enable-metrics"] if options.metrics else []
    flags += [] if options.guided else ["--skip-tokenizer-init"]
    flags += ["--disaggregation-mode", mode.disaggregation] if mode.disaggregation != "null" else []
    flags += ["--is-embedding"] if mode.embedding else []
    flags += ["--encoder-only"] if mode.encoding else []
    return tuple(flags)


def _conflicts(mode: LaunchMode, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for table in (_SET_BY_BATON, _NOT_SUPPORTED):
        yield from ((name, why) for name, why in table.items() if given.get(name) not in (None, False))
    yield from ((name, problem) for name, conflicts, problem in _RULES if conflicts(mode, given))


def _diffusion(given: Mapping[str, Any]) -> bool:
    return bool(given.get("dllm_algorithm"))


# Arguments that SGLang drops for a diffusion model, with a warning in its log.
_DROPPED_BY_DIFFUSION = {
    "enable_lora": "a diffusion model takes no adapters",
    "lora_paths": "a diffusion model takes no adapters",
    "enable_hierarchical_cache": "a diffusion model has no hierarchical cache",
    "enable_lmcache": "a diffusion model has no hierarchical cache",
    "enable_flexkv": "a diffusion model has no hierarchical cache",
    "enable_mixed_chunk": "a diffusion model computes prompts and outputs in separate batches",
}

_ONE_PROCESS = ("tp_size", "pp_size", "dp_size", "nnodes")

_RULES: tuple[tuple[str, Callable[[LaunchMode, Mapping[str, Any]], bool], str], ...] = (
    (
        "disaggregation_mode",
        lambda mode, given: given.get("disaggregation_mode", mode.disaggregation) != mode.disaggregation,
        "it follows from the worker's role; leave it out and set --role",
    ),
    (
        "dllm_algorithm",
        lambda mode, given: _diffusion(given) and not mode.generates_alone,
        "a diffusion model has no prefill and decode roles, and does not embed",
    ),
    (
        "dllm_algorithm_config",
        lambda _, given: bool(given.get("dllm_algorithm_config")) and not _diffusion(given),
        "it configures --dllm-algorithm; add that",
    ),
    (
        "pp_size",
        lambda _, given: _diffusion(given) and given.get("pp_size", 1) != 1,
        "a diffusion model has no pipeline parallelism",
    ),
    *(
        (name, lambda _, given, name=name: _diffusion(given) and bool(given.get(name)), problem)
        for name, problem in _DROPPED_BY_DIFFUSION.items()
    ),
    (
        "tokenizer_worker_num",
        lambda _, given: given.get("tokenizer_worker_num", 1) != 1,
        "Baton's frontends tokenize; leave it out",
    ),
    *(
        (
            name,
            lambda mode, given, name=name: mode.encoding and given.get(name, 1) != 1,
            "start more encode workers instead",
        )
        for name in _ONE_PROCESS
    ),
    (
        "nnodes",
        lambda _, given: given.get("nnodes", 1) > 1 and not given.get("dist_init_addr"),
        "an engine over several machines also needs --dist-init-addr",
    ),
)
