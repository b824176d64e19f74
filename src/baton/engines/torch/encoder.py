"""An encoder with its pooling: lists of tokens in, vectors out. Used from one thread."""

import os
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from baton.config.engines import TorchOptions
from baton.engines.torch.arena import find_device
from baton.errors import ConfigError
from baton.models.sentence import Pooling, SentenceLayout

PROBE = (0,)
# Waking a thread for fewer tokens costs more than it saves, on a busy machine many times more.
TOKENS_PER_THREAD = 128


class Encoder:
    """A sentence-transformers model in memory. Its weights are float32 unless bfloat16 is configured."""

    def __init__(self, options: TorchOptions, directory: Path, layout: SentenceLayout) -> None:
        """Load the model, which takes seconds. Raises ConfigError for a missing device or wrong weights."""
        self._threads = options.threads or len(os.sched_getaffinity(0))
        self._layout = layout
        self._device = find_device(options.device)
        self._model = _load(directory, torch.bfloat16 if options.dtype == "bfloat16" else torch.float32)
        self._model.to(self._device)
        [probe] = self.embed([PROBE])
        if any(number != number for number in probe):
            raise ConfigError(f"the weights in {directory} are broken: they give NaN")
        self.size = len(probe)

    @property
    def survives_errors(self) -> bool:
        """Whether it can be used after a failed computation: a GPU is in an unknown state then."""
        return self._device.type == "cpu"

    def embed(self, inputs: Sequence[Sequence[int]]) -> "list[array[float]]":
        """Return one vector for each input, computed together."""
        longest = max(len(tokens) for tokens in inputs)
        torch.set_num_threads(max(1, min(self._threads, longest * len(inputs) // TOKENS_PER_THREAD)))
        padded = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in inputs])
        lengths = torch.tensor([len(tokens) for tokens in inputs])
        mask = torch.arange(longest)[None, :] < lengths[:, None]
        with torch.inference_mode():
            mask = mask.to(self._device)
            hidden = self._model(input_ids=padded.to(self._device), attention_mask=mask.long()).last_hidden_state
            vectors = torch.cat([pool(hidden.float(), mask, pooling) for pooling in self._layout.poolings], dim=1)
            if self._layout.normalize:
                vectors = torch.nn.functional.normalize(vectors, dim=1)
            return [array("f", row.tobytes()) for row in vectors.cpu().numpy()]


def pool(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Return one vector for each row of `hidden` (rows, tokens, size); `mask` (rows, tokens) is False for padding.

    Padding comes after the tokens.
    """
    weights = mask[:, :, None].to(hidden.dtype)
    lengths = weights.sum(dim=1)
    match pooling:
        case Pooling.CLS:
            return hidden[:, 0]
        case Pooling.MAX:
            return hidden.masked_fill(~mask[:, :, None], float("-inf")).amax(dim=1)
        case Pooling.MEAN:
            return (hidden * weights).sum(dim=1) / lengths
        case Pooling.MEAN_SQRT_LEN:
            return (hidden * weights).sum(dim=1) / lengths.sqrt()
        case Pooling.WEIGHTED_MEAN:
            weights = weights * torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[None, :, None]
            return (hidden * weights).sum(dim=1) / weights.sum(dim=1)
        case Pooling.LAST:
            rows = torch.arange(hidden.shape[0], device=hidden.device)
            return hidden[rows, mask.sum(dim=1) - 1]


def _load(directory: Path, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        model, info = AutoModel.from_pretrained(
            directory, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:  # transformers and safetensors have no common type for bad files
        raise ConfigError(f"cannot load the weights in {directory}: {' '.join(str(error).split())}") from error
    missing = sorted(key for key in info["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise ConfigError(
            f"the weights in {directory} are incomplete: {missing[0]} and {len(missing) - 1} others are missing"
        )
    eager: torch.nn.Module = model.eval()
    return eager
