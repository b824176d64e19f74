"""Mends what SGLang and its libraries take for granted about a GPU. Every interpreter of the environment loads it,
for the engine makes processes of its own.

| module | what it takes for granted | what is done |
|---|---|---|
| torchvision | its CUDA library can be loaded | the two operators it looks for get a schema |
| nixl | KV is in GPU memory | that name means plain memory |
| sglang, mooncake | page indices can be pinned for a copy to the GPU | the plain way is taken |
| sglang, LoRA | small tables can be pinned for a copy to the GPU | they are not |
| sglang, torch attention | who pads batches on a CPU, as attention over ranks does, has AMX | it pads as on a GPU |
| sglang, expert records | every device has a cache to empty and captures graphs | a CPU has and does neither |
| sglang, experts in torch | every expert is on this rank | choices of experts on other ranks are left out |
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _before_torchvision() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)  # its operators go with it


def _after_nixl(module: Any) -> None:
    begin = module.nixl_agent.__init__

    def begin_on_plain_memory(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.nixl_mems["VRAM"] = self.nixl_mems["DRAM"]

    module.nixl_agent.__init__ = begin_on_plain_memory


def _after_mooncake(module: Any) -> None:
    module.MooncakeKVSender.supports_host_tensor_indices = False


def _before_lora() -> None:
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, pin_memory: bool = False, **options: Any) -> Any:
            return make(*args, **options)

        return made

    torch.tensor, torch.empty, torch.zeros = map(unpinned, (torch.tensor, torch.empty, torch.zeros))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[assignment, method-assign]


def _after_torch_attention(module: Any) -> None:
    backend = module.TorchNativeAttnBackend
    if not hasattr(backend, "get_cpu_graph_seq_len_fill_value"):
        backend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def _after_expert_records(module: Any) -> None:
    import torch

    if not hasattr(torch.cpu, "empty_cache"):
        torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    if not hasattr(torch.cpu, "is_current_stream_capturing"):
        torch.cpu.is_current_stream_capturing = lambda: False  # type: ignore[attr-defined]


def _after_experts(module: Any) -> None:
    import torch

    compute = module.moe_forward_native

    def compute_local(layer: Any, x: Any, topk_output: Any, config: Any) -> Any:
        weights, ids = topk_output.topk_weights, topk_output.topk_ids
        local = ids >= 0  # of experts on other ranks the dispatcher says -1
        if local.all():
            return compute(layer, x, topk_output, config)
        rows, out = local.nonzero(as_tuple=True)[0], torch.zeros_like(x)
        if len(rows):
            choices = topk_output._replace(topk_weights=weights[local][:, None], topk_ids=ids[local][:, None])
            out.index_add_(0, rows, compute(layer, x[rows], choices, config))
        return out

    module.moe_forward_native = compute_local


_kept: list[object] = []
_before: dict[str, Callable[[], None]] = {
    "torchvision": _before_torchvision,
    "sglang.srt.lora.lora_manager": _before_lora,
}
_after: dict[str, Callable[[Any], None]] = {
    "nixl_cu12._api": _after_nixl,
    "nixl_cu13._api": _after_nixl,
    "sglang.srt.disaggregation.mooncake.conn": _after_mooncake,
    "sglang.srt.eplb.expert_distribution": _after_expert_records,
    "sglang.srt.layers.attention.torch_native_backend": _after_torch_attention,
    "sglang.srt.layers.moe.fused_moe_native": _after_experts,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Acts once, before or after a module of the tables is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if (before := _before.pop(fullname, None)) is not None:
            before()
        mend = _after.pop(fullname, None)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if mend is not None else None
        if mend is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            mend(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
