"""Whether Triton can compile the kernels: it needs a C compiler, Python's headers and a GPU that they fit."""

import subprocess
from collections.abc import Callable

import torch
from triton.errors import TritonError

from baton.engines.torch.gpu.fused import add_norm


def find_problem(probe: Callable[[], object], compute: Callable[[], object]) -> str | None:
    """Return why kernels cannot be used, None if they can. `probe` runs any kernel, `compute` all of them.

    Errors of `compute` that are not Triton's are raised: they are no reason to compute in another way.
    """
    try:
        probe()
    except (TritonError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        return f"{error}; Triton needs a C compiler and Python's headers, as with `apt install gcc python3-dev`"
    try:
        compute()
    except TritonError as error:
        return str(error)
    return None


def run_small_kernel(device: torch.device) -> None:
    """Compile one small kernel and run it."""
    add_norm(torch.zeros(1, 16, device=device), None, torch.ones(16, device=device), 1e-5)
