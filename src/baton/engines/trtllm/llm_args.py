"""From the user's tree to the arguments of the library's engine: defaults, what a part needs, and what is refused."""

import logging
import typing
from collections.abc import Iterator
from pathlib import Path

from baton.config.engines import TrtllmOptions
from baton.engines.trtllm.cli_args import Tree, merged
from baton.engines.trtllm.compat import Library
from baton.engines.trtllm.library_types import ArgumentsModel
from baton.errors import ConfigError

log = logging.getLogger(__name__)

# A prefill keeps its KV until a decode has taken it, and nothing in the API gives up what nobody takes.
KV_TAKEN_MS = 60_000
DEFAULT_BATCH = 2048
DEFAULT_STEP_TOKENS = 8192
DEFAULT_ENCODINGS = 8

# What autodeploy has ways of its own for.
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

_OURS = {
    "model": "use --model of Baton",
    "backend": "use --trtllm-backend of Baton",
    "mm_encoder_only": "an engine that only encodes media does not generate; use --role encode of Baton",
    "encode_only": "an engine that only encodes does not generate",
}


def plan_arguments(options: TrtllmOptions, asked: Tree, model_dir: Path, part: str, context: int | None = None) -> Tree:
    """Return the arguments as a tree: Baton's defaults, and over them what was asked for.

    Needs no library. Raises ConfigError for what contradicts `part`, the options, or how Baton reads the engine.
    """
    _refuse_conflicts(asked, part)
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
    if part in ("prefill", "decode"):
        tree["cache_transceiver_config"] = {"backend": "DEFAULT", "kv_transfer_timeout_ms": KV_TAKEN_MS}
    given = merged(tree, {name: value for name, value in asked.items() if value is not None})
    if options.backend == "_autodeploy":
        dropped = [name for name in NOT_AUTODEPLOY if name in given]
        if dropped:
            log.warning("autodeploy has no %s: dropped", ", ".join(dropped))
        return {name: value for name, value in given.items() if name not in dropped}
    return given


def build_arguments(library: Library, options: TrtllmOptions, tree: Tree) -> Tree:
    """Return what the library's engine is made with. Raises ConfigError, naming an argument or field it has not."""
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


def plan_encoder_arguments(options: TrtllmOptions, asked: Tree, model_dir: Path) -> Tree:
    """Return the arguments of an encoder as a tree. Needs no library. Raises ConfigError."""
    if options.backend != "pytorch":
        raise ConfigError(f"--trtllm-backend {options.backend} encodes media with the prompt, and not for others")
    _refuse_ours(asked)
    given = {name: value for name, value in asked.items() if value is not None}
    return {"model": str(model_dir), "max_batch_size": DEFAULT_ENCODINGS, **given}


def build_encoder_arguments(library: Library, tree: Tree) -> Tree:
    """Return what the library's encoder is made with. Raises ConfigError, naming an argument that it has not."""
    _refuse_unknown(tree, library.arguments, "", library.features.version)
    return tree


def dp_size(tree: Tree) -> int:
    """Return over how many ranks attention is spread, each with a KV cache of its own."""
    return number(tree, "tensor_parallel_size", 1) if tree.get("enable_attention_dp") else 1


def number(tree: Tree, name: str, default: int) -> int:
    """Return a whole number among the arguments. Raises ConfigError."""
    value = tree.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: {value!r} is not a whole number")
    return value


def _refuse_ours(asked: Tree) -> None:
    for name, remedy in _OURS.items():
        if asked.get(name):
            raise ConfigError(f"{name} cannot be given to TensorRT-LLM here: {remedy}")


def _refuse_conflicts(asked: Tree, part: str) -> None:
    _refuse_ours(asked)
    if asked.get("enable_iter_perf_stats") is False:
        raise ConfigError("enable_iter_perf_stats: Baton reads the engine's load from them; leave it out")
    if asked.get("num_postprocess_workers"):
        raise ConfigError("num_postprocess_workers: Baton takes tokens, which need no such workers; leave it out")
    if part in ("prefill", "decode"):
        mover = asked.get("cache_transceiver_config", {})
        if not isinstance(mover, dict):
            raise ConfigError(f"cache_transceiver_config: a {part} engine moves KV by it; leave it out, or set fields")
        if mover.get("backend", "DEFAULT") is None:
            raise ConfigError(f"cache_transceiver_config.backend: a {part} engine needs one; name it, or leave it out")


def _refuse_unknown(tree: Tree, model: ArgumentsModel, place: str, version: str) -> None:
    for name, value in tree.items():
        if name not in model.model_fields:
            raise ConfigError(f"TensorRT-LLM {version} has no argument {place}{name}; see --help-engine")
        if isinstance(value, dict):
            inner = list(_models(model.model_fields[name].annotation))
            if inner:
                _refuse_unknown_in_all(value, inner, f"{place}{name}.", version)


def _refuse_unknown_in_all(tree: Tree, models: list[ArgumentsModel], place: str, version: str) -> None:
    """A field that may hold one of several configs takes what any of them has."""
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
    """Find the pydantic classes in a type, inside unions and annotations."""
    if isinstance(annotation, type) and "model_fields" in dir(annotation):
        yield typing.cast(ArgumentsModel, annotation)
    else:
        for part in typing.get_args(annotation):
            yield from _models(part)
