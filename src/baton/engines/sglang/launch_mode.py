"""What a part needs of SGLang's arguments, and which ones a person may not write. Imports no SGLang."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from baton.config.engines import SglangOptions
from baton.engines.sglang.compat import Dialect
from baton.errors import ConfigError

Part = Literal["whole", "prefill", "decode", "embed"]

PAGE = 16
MODES = {"whole": "null", "embed": "null", "prefill": "prefill", "decode": "decode"}

# What Baton sets itself, and where a person sets it.
_OURS = {
    "model_path": "the model is what --model says",
    "served_model_name": "the name is what --name says",
    "incremental_streaming_output": "Baton sets how tokens are streamed",
    "stream_output": "Baton sets how tokens are streamed",
    "skip_tokenizer_init": "say --sglang-guided false instead",
    "enable_metrics": "it is on unless --sglang-metrics false",
    "is_embedding": "give the worker the role embed instead",
    "schedule_low_priority_values_first": "a greater priority goes first, in every engine",
}

# What takes the engine out of the shape that the adapter drives.
_FOREIGN = {
    "grpc_mode": "Baton talks to the engine itself",
    "smg_grpc_mode": "Baton talks to the engine itself",
    "use_ray": "Baton starts the engine's processes itself",
    "encoder_only": "this worker generates",
    "language_only": "media are encoded in this engine",
    "enable_pd_role_switch": "a worker keeps its role",
    "checkpoint_engine_wait_weights_before_ready": "a worker is ready when it has its weights",
    "allow_auto_truncate": "a request that is too long is refused",
}


def refuse_conflicts(part: Part, given: Mapping[str, Any], options: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for an argument that a person wrote and that cannot be, saying what to change.

    `given` has the arguments that were written, by SGLang's field names; `options` how each was written.
    """
    for name, problem in _conflicts(part, given):
        flag = (options or {}).get(name, f"--{name.replace('_', '-')}")
        raise ConfigError(f"{flag}: {problem}")


def own_flags(
    part: Part, options: SglangOptions, model_dir: Path, name: str, dialect: Dialect, given: frozenset[str]
) -> tuple[str, ...]:
    """Return what Baton asks of SGLang. What a person may change comes first in a line that ends with their own."""
    flags = ["--model-path", str(model_dir), "--served-model-name", name, dialect.stream_flag]
    flags += [] if "host" in given else ["--host", options.host]
    flags += [] if "page_size" in given else ["--page-size", str(PAGE)]
    flags += [] if "log_level" in given else ["--log-level", "error"]
    flags += ["--enable-metrics"] if options.metrics else []
    flags += [] if options.guided else ["--skip-tokenizer-init"]
    if part in ("prefill", "decode"):
        flags += ["--disaggregation-mode", part]
    if part == "embed":
        flags += ["--is-embedding"]
    return tuple(flags)


def _conflicts(part: Part, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for table in (_OURS, _FOREIGN):
        yield from ((name, why) for name, why in table.items() if given.get(name) not in (None, False))
    mode = given.get("disaggregation_mode", MODES[part])
    if mode != MODES[part]:
        yield "disaggregation_mode", f"{mode} contradicts the worker's role; leave it out, and choose the role"
    if given.get("dllm_algorithm") and part != "whole":
        yield "dllm_algorithm", "a diffusion model neither takes nor gives KV, and does not embed"
    if given.get("dllm_algorithm") and given.get("enable_lora"):
        yield "enable_lora", "a diffusion model takes no adapters"
    if given.get("tokenizer_worker_num", 1) != 1:
        yield "tokenizer_worker_num", "Baton's frontends tokenize; leave it out"
    if given.get("nnodes", 1) > 1 and not given.get("dist_init_addr"):
        yield "nnodes", "an engine over several machines needs --dist-init-addr as well"
