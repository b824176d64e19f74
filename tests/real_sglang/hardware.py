"""What the tests of the real SGLang run on, a CPU or a GPU: its arguments, model shapes and tolerances follow from it.

On a GPU everything is bfloat16, which SGLang's kernels ask for, and heads have 64 numbers, the least they take. Many
engines share the GPU: each takes the KV that `--max-total-tokens` allows, and the fraction of memory is no limit.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
ON_GPU = GPUS > 0

_CPU = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--sleep-on-idle"),
)
_GPU = (
    *("--dtype", "bfloat16", "--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--mm-attention-backend", "sdpa", "--mem-fraction-static", "0.9", "--sleep-on-idle"),
)
EAGER = ("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled")
HARDWARE = _GPU if ON_GPU else _CPU
"""Arguments of every engine."""

SMALL = (*HARDWARE, *EAGER, "--max-total-tokens", "8192", "--max-running-requests", "4")
"""Arguments of an engine that one test uses at a time."""

SERVED = ("--", *HARDWARE, *EAGER, "--max-total-tokens", "16384")
"""The same for `baton serve`."""

EXACT = ("--enable-deterministic-inference",) if ON_GPU else ()
"""Arguments with which a token does not depend on what else is computed: in bfloat16 another batch rounds otherwise."""

GRAPHS = ("--cuda-graph-backend-prefill", "disabled", "--cuda-graph-bs-decode", "1", "2", "4", "8")
FLASH = ("--attention-backend", "fa3")
"""FlashAttention 3. `scripts/sglang_gpu` carries it for heads of 128 numbers."""

GROUP_BACKEND = "nccl" if GPUS > 1 else "gloo"
"""Of groups that weights come through: NCCL does not connect the two processes of a test on one GPU."""

LORA_BACKEND = "triton" if ON_GPU else "torch_native"
SHAPE: dict[str, object] = (
    {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "initializer_range": 0.12,
    }
    if ON_GPU
    else {}
)
HIDDEN, QUERIES, VALUES = (256, 256, 128) if ON_GPU else (48, 96, 32)
"""Sizes of the tiny model: its hidden state, and the rows of its query and value projections."""

SCORE_TOLERANCE = 0.15 if ON_GPU else 1e-3
"""How far the log-probabilities of two ways to compute them are apart."""

SAME_ANSWERS = 0.5 if ON_GPU else 1.0
"""The share of greedy answers that are equal where media were encoded by another process, in other batches."""

VECTOR_TOLERANCE = 0.02 if ON_GPU else 1e-3
"""How far numbers of a vector of length 1 are apart."""

needs_cpu = pytest.mark.skipif(ON_GPU, reason="it is about SGLang on a CPU")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="it needs a GPU: make test-sglang-gpu")
large_heads = pytest.mark.skipif(
    ON_GPU, reason="the model has heads of 32 numbers, and SGLang's rotary kernel for GPUs takes 64; it runs on a CPU"
)
needs_two = pytest.mark.skipif(
    GPUS == 1, reason="it needs two GPUs: NCCL before 2.30 refuses two ranks on one; make test-sglang has it on a CPU"
)
slow_prompts = pytest.mark.skipif(
    ON_GPU, reason="it interrupts a prompt, and a GPU computes one in milliseconds; make test-sglang has it on a CPU"
)
exact_tower = pytest.mark.skipif(
    ON_GPU, reason="it compares with float32: in bfloat16 a random tower rounds to other tokens; it runs on a CPU"
)
HAS_VIDEO = importlib.util.find_spec("av") is not None
needs_video = pytest.mark.skipif(not HAS_VIDEO, reason="it needs PyAV to make and to read a video")


def tiny_model(directory: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Write a tiny random model in a shape for this hardware; return `directory`."""
    from tests.doubles.tiny_models import make_tiny_model

    return make_tiny_model(directory, family, seed, **(SHAPE | changes))


def cores_of_ranks() -> str:
    """Return the cores of two ranks: SGLang asks where there are more ranks than sockets."""
    return f"0|{min(1, (os.cpu_count() or 1) - 1)}"
