"""The KV cache as others see it: where its blocks lie, and which model they are of."""

import hashlib
from collections.abc import Mapping

import msgspec
from torch import Tensor

from baton.engines.torch.models.config import LlamaConfig, inverse_frequencies
from baton.engines.torch.weights import meaning
from baton.ports.transfer import KvMemory, KvShape

# What a block means: keys after their rotation, [token, head, dimension]. Count up when that changes.
_LAYOUT = 1
_SAMPLES = 64


def describe_kv(
    config: LlamaConfig, parts: Mapping[str, Tensor], kv: Tensor, block: int, blocks: int, descriptor: int | None
) -> KvMemory:
    """Return what others need to read or write `kv`, which is [layers, 2, slots, KV heads, dimensions]."""
    layers, two, slots, kv_heads, head_dim = kv.shape
    token_bytes = kv_heads * head_dim * kv.dtype.itemsize
    return KvMemory(
        shape=KvShape(
            model=identify(config, parts),
            dtype=str(kv.dtype).removeprefix("torch."),
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block,
        ),
        address=kv.data_ptr(),
        planes=layers * two,
        plane_bytes=slots * token_bytes,
        block_bytes=block * token_bytes,
        blocks=blocks,
        device=str(kv.device),
        descriptor=descriptor,
    )


def identify(config: LlamaConfig, parts: Mapping[str, Tensor]) -> str:
    """Return a name for a loaded model, the same on every host and from every directory and split into files.

    It covers the shape of the model, its positions, and some values of every tensor as they are loaded: another model,
    and another training of the same one, have another name. Weights that are replaced later do not change it.
    """
    digest = hashlib.blake2b(digest_size=12)
    frequencies, scale = inverse_frequencies(config)
    # Powers differ in their last digits from one maths library to the next.
    positions = [f"{value:.9g}" for value in (*frequencies, scale)]
    digest.update(msgspec.json.encode([_LAYOUT, meaning(config) | {"positions": positions}]))
    for name in sorted(parts):
        values = parts[name].flatten()
        sample = values[:: max(1, len(values) // _SAMPLES)].float().cpu()
        digest.update(msgspec.json.encode([name, list(parts[name].shape)]) + sample.numpy().tobytes())
    return f"{config.family}-{digest.hexdigest()}"
