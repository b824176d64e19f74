"""Arguments of the library's engine and encoder: Baton's defaults under the user's tree, and what is refused."""

import logging
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from baton.config.engines import TrtllmOptions
from baton.engines.trtllm.cli_args import Tree, merged
from baton.engines.trtllm.compat import Library
from baton.engines.trtllm.library_types import ArgumentsModel
from baton.errors import ConfigError

log = logging.getLogger(__name__)

# What a disaggregated engine computes, by the library's names.
RequestType = Literal["context_only", "generation_only"]

# A context-only request keeps its KV until it has been read; the API has no call that frees KV that is never read.
KV_TIMEOUT_MS = 60_000
DEFAULT_BATCH = 2048
DEFAULT_STEP_TOKENS = 8192
DEFAULT_ENCODINGS = 8

# Arguments that autodeploy replaces by its own.
NOT_AUTODEPLOY = (
    "build_config",
    "scheduler_config",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "moe_cluster_parallel_size",
    "moe_tensor_parallel_size",
    "moe_expert_parallel_size",
    "enable_attention_dp",
    "cp_config",
)

_SET_BY_BATON = {
    "model": "use --model of Baton",
    "backend": "use --trtllm-backend of Baton",
    "mm_encoder_only": "an engine that only encodes media does not generate; use --role encode of Baton",
    "encode_only": "an engine that only encodes does not generate",
}


def plan_arguments(
    options: TrtllmOptions,
    user_args: Tree,
    model_dir: Path,
    request_type: RequestType | None,
    context: int | None = None,
) -> Tree:
    """Return the arguments of the engine as a tree: Baton's defaults, and the user's arguments over them.

    Needs no library. Raises ConfigError for arguments that contradict `request_type`, the options or Baton itself.
    """
    _refuse_conflicts(user_args, request_type)
    tree = merged(_defaults(options, model_dir, request_type, context), _set(user_args))
    return _without_unsupported(tree) if options.backend == "_autodeploy" else tree


def _defaults(options: TrtllmOptions, model_dir: Path, request_type: RequestType | None, context: int | None) -> Tree:
    tree: Tree = {
        "model": str(model_dir),
        "enable_iter_perf_stats": True,
        "return_perf_metrics": True,
        "kv_cache_config": {"event_buffer_max_size": options.kv_events},
    }
    if context is not None:
        tree["max_seq_len"] = context
    if options.guided != "none":
        tree["guided_decoding_backend"] = options.guided
    if request_type is not None:
        tree["cache_transceiver_config"] = {"backend": "DEFAULT", "kv_transfer_timeout_ms": KV_TIMEOUT_MS}
    return tree


def _without_unsupported(tree: Tree) -> Tree:
    dropped = [name for name in NOT_AUTODEPLOY if name in tree]
    if dropped:
        log.warning("autodeploy has no %s: dropped", ", ".join(dropped))
    return {name: value for name, value in tree.items() if name not in dropped}


def _set(user_args: Tree) -> Tree:
    """A null at the top level means the default."""
    return {name: value for name, value in user_args.items() if value is not None}


def build_arguments(library: Library, options: TrtllmOptions, tree: Tree) -> Tree:
    """Return the arguments of the library's constructor. Raises ConfigError for an unknown argument or field."""
    model = library.arguments if options.backend == "pytorch" else library.autodeploy_arguments()
    _refuse_unknown(tree, model, "", library.features.version)
    arguments = dict(tree)
    for name, make in (
        ("kv_cache_config", library.kv_cache_config),
        ("cache_transceiver_config", library.cache_transceiver_config),
    ):
        fields = tree.get(name)
        if isinstance(fields, dict):
            try:
                arguments[name] = make(**fields)
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{name}: {' '.join(str(error).split())}") from error
    return arguments


def plan_encoder_arguments(options: TrtllmOptions, user_args: Tree, model_dir: Path) -> Tree:
    """Return the arguments of an encoder as a tree. Needs no library. Raises ConfigError."""
    if options.backend != "pytorch":
        raise ConfigError(f"--trtllm-backend {options.backend} has no encoder: it encodes media with the prompt")
    _refuse_set_by_baton(user_args)
    return {"model": str(model_dir), "max_batch_size": DEFAULT_ENCODINGS, **_set(user_args)}


def build_encoder_arguments(library: Library, tree: Tree) -> Tree:
    """Return the arguments of the library's constructor. Raises ConfigError for an unknown argument."""
    _refuse_unknown(tree, library.arguments, "", library.features.version)
    return tree


def dp_size(tree: Tree) -> int:
    """Return the number of attention data-parallel ranks, each with its own KV cache."""
    return number(tree, "tensor_parallel_size", 1) if tree.get("enable_attention_dp") else 1


def number(tree: Tree, name: str, default: int) -> int:
    """Return an integer argument. Raises ConfigError."""
    value = tree.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: {value!r} is not a whole number")
    return value


def _refuse_set_by_baton(user_args: Tree) -> None:
    for name, remedy in _SET_BY_BATON.items():
        if user_args.get(name):
            raise ConfigError(f"{name} cannot be set here: {remedy}")


def _refuse_conflicts(user_args: Tree, request_type: RequestType | None) -> None:
    _refuse_set_by_baton(user_args)
    if user_args.get("enable_iter_perf_stats") is False:
        raise ConfigError("enable_iter_perf_stats: Baton reads the load from these statistics; leave it out")
    if user_args.get("num_postprocess_workers"):
        raise ConfigError("num_postprocess_workers: Baton reads tokens, which need no postprocessing; leave it out")
    if request_type is not None:
        _refuse_no_transceiver(user_args.get("cache_transceiver_config", {}))


def _refuse_no_transceiver(config: object) -> None:
    """A disaggregated engine moves KV by its cache transceiver."""
    if not isinstance(config, dict):
        raise ConfigError("cache_transceiver_config: a prefill or decode engine needs it; leave it out, or set fields")
    if config.get("backend", "DEFAULT") is None:
        raise ConfigError("cache_transceiver_config.backend: a prefill or decode engine needs one; leave it out")


def _refuse_unknown(tree: Tree, model: ArgumentsModel, place: str, version: str) -> None:
    for name, value in tree.items():
        if name not in model.model_fields:
            raise ConfigError(f"TensorRT-LLM {version} has no argument {place}{name}; see --help-engine")
        if isinstance(value, dict):
            inner = list(_models(model.model_fields[name].annotation))
            if inner:
                _refuse_unknown_in_all(value, inner, f"{place}{name}.", version)


def _refuse_unknown_in_all(tree: Tree, models: list[ArgumentsModel], place: str, version: str) -> None:
    """A field whose type is a union of configs accepts the fields of any of them."""
    problem: ConfigError | None = None
    for model in models:
        try:
            _refuse_unknown(tree, model, place, version)
            return
        except ConfigError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _models(annotation: object) -> Iterator[ArgumentsModel]:
    """Yield the pydantic classes in a type, inside unions and annotations."""
    if isinstance(annotation, type) and "model_fields" in dir(annotation):
        yield typing.cast(ArgumentsModel, annotation)
    else:
        for member in typing.get_args(annotation):
            yield from _models(member)
