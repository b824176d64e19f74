"""Stands in for SGLang's compiled kernels on a CPU without AMX.

SGLang asks for names while it is imported; what it computes with then is torch. A name that is called all the same
says so. The functions below are called, and do what the compiled ones do.
"""

import torch

__version__ = "0.0.0+baton.cpu"

# Operators that models look up while they are imported. None is called where there is no AMX.
_operators = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_qkvzba_split_reshape_cat_cpu",
    "fused_sigmoid_mul_cpu",
):
    _operators.define(f"{_name}(Tensor x) -> Tensor")


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the new places of each request into its row, one after the other."""
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        places = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = places.to(req_to_token.dtype)
        taken += end - start


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A reference that keeps the tensor alive is as good, where nothing is captured."""
    return tensor


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is a compiled kernel, and not here")

    missing.__name__ = name
    return missing
