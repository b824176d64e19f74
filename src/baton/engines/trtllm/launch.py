"""Making the library's engine and learning what it is: slow, so all of it runs on threads. See `adapter.py`."""

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
    """Load the model; minutes. Raises ConfigError or EngineDead."""
    _refuse_without_gpu(library)
    arguments = build_arguments(library, options, tree)
    return _made(library.llm if options.backend == "pytorch" else library.autodeploy_llm(), arguments)


def make_encoder(library: Library, arguments: Tree) -> Encoder:
    """Load the part of a model that encodes media; minutes. Raises ConfigError or EngineDead."""
    _refuse_without_gpu(library)
    return _made(library.encoder(), arguments)


def _refuse_without_gpu(library: Library) -> None:
    if library.gpu_count() == 0:
        raise ConfigError("TensorRT-LLM needs an NVIDIA GPU, and this machine shows none (nvidia-smi tells more)")


def _made(make: Callable[..., T], arguments: Tree) -> T:
    try:
        return make(**arguments)
    except (ValueError, TypeError) as error:  # pydantic's, which says which argument and why
        raise ConfigError(f"TensorRT-LLM refuses its arguments: {' '.join(str(error).split())}") from error
    except Exception as error:
        raise EngineDead(f"TensorRT-LLM could not start: {error!r}") from error


def read_capacity(library: Library, llm: Llm) -> tuple[int, int]:
    """Return how many blocks the KV cache has and how many tokens a block. Raises EngineDead.

    Before 1.3 only an iteration tells, so there must have been a request.
    """
    told = None
    try:
        if library.features.kv_capacity:
            told = kv_capacity([{"kvCacheStats": dict(cast(Llm13, llm).get_kv_cache_capacity())}])
        else:
            deadline = time.monotonic() + CAPACITY_S
            while told is None and time.monotonic() < deadline:
                told = kv_capacity(llm.get_stats(timeout=1.0))
    except Exception as error:
        raise EngineDead(f"TensorRT-LLM does not tell how large its KV cache is: {error!r}") from error
    if told is None:
        raise EngineDead("TensorRT-LLM does not tell how large its KV cache is")
    return told


def context_of(tree: Tree, model_context: int | None, model_dir: Path) -> int:
    """Return the context length that the engine is made with. Raises ConfigError."""
    if "max_seq_len" not in tree and model_context is None:
        raise ConfigError(f"max_seq_len: {model_dir} does not say how long its context is; give --max_seq_len N")
    context = number(tree, "max_seq_len", model_context or 0)
    step = number(tree, "max_num_tokens", DEFAULT_STEP_TOKENS)
    if step < context and not tree.get("enable_chunked_prefill"):
        log.warning(
            "prompts of more than %d tokens will be refused, in a context of %d: add --enable_chunked_prefill true",
            step,
            context,
        )
    return context
