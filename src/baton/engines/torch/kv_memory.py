"""The KV cache as peers see it: the addresses of its blocks and the identity of its model."""

import hashlib
from collections.abc import Mapping

import msgspec
from torch import Tensor

from baton.engines.torch.models.config import LlamaConfig, inverse_frequencies
from baton.engines.torch.weights import meaning
from baton.ports.transfer import BlockMemory, KvShape

# The content of a block: rotated keys, and values, [token, head, dimension]. Increment when that changes.
_LAYOUT = 1
_SAMPLES = 64


def describe_kv(
    config: LlamaConfig, parts: Mapping[str, Tensor], kv: Tensor, block: int, blocks: int, descriptor: int | None
) -> BlockMemory:
    """Return what peers need to read or write `kv`, which is [layers, 2, slots, KV heads, dimensions]."""
    layers, two, slots, kv_heads, head_dim = kv.shape
    token_bytes = kv_heads * head_dim * kv.dtype.itemsize
    return BlockMemory(
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
    """Return the identity of a loaded model, the same on every host and for every directory and sharding.

    It covers the shape of the model, its positions, and some values of every tensor as loaded: another model or another
    training of the same one has another identity. Weights that are replaced later do not change it.
    """
    digest = hashlib.blake2b(digest_size=12)
    frequencies, scale = inverse_frequencies(config)
    # The last digits of powers differ between maths libraries.
    positions = [f"{value:.9g}" for value in (*frequencies, scale)]
    digest.update(msgspec.json.encode([_LAYOUT, meaning(config) | {"positions": positions}]))
    for name in sorted(parts):
        values = parts[name].flatten()
        sample = values[:: max(1, len(values) // _SAMPLES)].float().cpu()
        digest.update(msgspec.json.encode([name, list(parts[name].shape)]) + sample.numpy().tobytes())
    return f"{config.family}-{digest.hexdigest()}"
