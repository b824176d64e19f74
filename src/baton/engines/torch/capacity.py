"""How much a worker computes at once, where the options leave it open: by its device and that device's memory."""

import msgspec
import torch

from baton.config.engines import TorchOptions

_GIB = 1 << 30
_CPU = {"max_running": 64, "batch_tokens": 256, "kv_memory_fraction": 0.3}
# The rest of a GPU's free memory is for the rows of a step, logits and captured graphs.
_GPU_FRACTION = 0.85
# Memory of a GPU from which on it computes so many sequences and tokens of a step.
_GPUS = ((60 * _GIB, 512, 8192), (30 * _GIB, 256, 4096), (0, 128, 2048))


def with_device_defaults(options: TorchOptions, device: torch.device) -> TorchOptions:
    """Return the options with a value for all that is 0.

    A long step delays every sequence that decodes beside it. A CPU is as fast with short steps; a GPU is not.
    """
    defaults: dict[str, float] = dict(_CPU)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        running, tokens = next((running, tokens) for least, running, tokens in _GPUS if memory >= least)
        defaults = {"max_running": running, "batch_tokens": tokens, "kv_memory_fraction": _GPU_FRACTION}
    open_ones = {name: value for name, value in defaults.items() if not getattr(options, name)}
    return msgspec.structs.replace(options, **open_ones)
