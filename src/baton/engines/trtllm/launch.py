"""Constructs the library's engine or encoder and reads its limits. Slow: called on threads."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from baton.config.engines import TrtllmOptions
from baton.engines.trtllm.cli_args import Tree
from baton.engines.trtllm.compat import Library
from baton.engines.trtllm.library_types import Encoder, Llm, Llm13
from baton.engines.trtllm.llm_args import DEFAULT_STEP_TOKENS, build_arguments, number
from baton.engines.trtllm.readings import kv_capacity
from baton.errors import ConfigError, EngineDead

log = logging.getLogger(__name__)

CAPACITY_S = 60.0

T = TypeVar("T")


def make_llm(library: Library, options: TrtllmOptions, tree: Tree) -> Llm:
    """Load the model; takes minutes. Raises ConfigError or EngineDead."""
    _refuse_without_gpu(library)
    arguments = build_arguments(library, options, tree)
    return _construct(library.llm if options.backend == "pytorch" else library.autodeploy_llm(), arguments)


def make_encoder(library: Library, arguments: Tree) -> Encoder:
    """Load the media encoder of a model; takes minutes. Raises ConfigError or EngineDead."""
    _refuse_without_gpu(library)
    return _construct(library.encoder(), arguments)


def _refuse_without_gpu(library: Library) -> None:
    if library.gpu_count() == 0:
        raise ConfigError("TensorRT-LLM needs an NVIDIA GPU, and this machine has none (see nvidia-smi)")


def _construct(make: Callable[..., T], arguments: Tree) -> T:
    try:
        return make(**arguments)
    except (ValueError, TypeError) as error:  # pydantic's, with the argument and the reason
        raise ConfigError(f"TensorRT-LLM rejects its arguments: {' '.join(str(error).split())}") from error
    except Exception as error:
        raise EngineDead(f"TensorRT-LLM could not start: {error!r}") from error


def read_capacity(library: Library, llm: Llm) -> tuple[int, int]:
    """Return the number of KV blocks and the tokens per block. Raises EngineDead.

    Before 1.3 both are only in the statistics of an iteration, so a request must have run.
    """
    capacity = None
    try:
        if library.features.kv_capacity:
            capacity = kv_capacity([{"kvCacheStats": dict(cast(Llm13, llm).get_kv_cache_capacity())}])
        else:
            deadline = time.monotonic() + CAPACITY_S
            while capacity is None and time.monotonic() < deadline:
                capacity = kv_capacity(llm.get_stats(timeout=1.0))
    except Exception as error:
        raise EngineDead(f"TensorRT-LLM does not report the size of its KV cache: {error!r}") from error
    if capacity is None:
        raise EngineDead("TensorRT-LLM does not report the size of its KV cache")
    return capacity


def context_of(tree: Tree, model_context: int | None, model_dir: Path) -> int:
    """Return the context length to construct the engine with. Raises ConfigError."""
    if "max_seq_len" not in tree and model_context is None:
        raise ConfigError(f"max_seq_len: {model_dir} does not contain the context length; give --max_seq_len N")
    context = number(tree, "max_seq_len", model_context or 0)
    step = number(tree, "max_num_tokens", DEFAULT_STEP_TOKENS)
    if step < context and not tree.get("enable_chunked_prefill"):
        log.warning(
            "prompts of more than %d tokens will be rejected, in a context of %d: add --enable_chunked_prefill true",
            step,
            context,
        )
    return context
