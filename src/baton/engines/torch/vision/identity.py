"""The identity of an encoder, from its files: a digest of its configuration and of samples of its weights."""

import hashlib
from contextlib import ExitStack
from pathlib import Path

import msgspec

from baton.engine_kit.safetensors_file import SafetensorsFile, StoredTensor, weight_files
from baton.errors import ConfigError

# How tensors of the tower and of its connector are called in the files, and in the model.
PREFIXES = {
    "model.vision_model.": "vision_model.",
    "model.connector.": "connector.",
    "vision_model.": "vision_model.",
    "connector.": "connector.",
    "model.visual.": "visual.",
    "visual.": "visual.",
}
_SAMPLES = 8
_SAMPLE_BYTES = 64


def tower_tensor(name: str) -> str | None:
    """Return the name in the model of a tensor of the files; None for one of the language model."""
    for prefix, own in PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return None


def identify_tower(directory: Path, version: int, configuration: object) -> str:
    """Return the identity of the encoder in `directory` with this configuration. Raises ConfigError."""
    digest = hashlib.blake2b(msgspec.json.encode([version, configuration], order="sorted"), digest_size=16)
    with ExitStack() as stack:
        files = [stack.enter_context(SafetensorsFile(path)) for path in weight_files(directory)]
        homes = {own: (file, name) for file in files for name in file.tensors if (own := tower_tensor(name))}
        if not homes:
            raise ConfigError(f"{directory} has no weights of a vision tower")
        for own in sorted(homes):
            file, name = homes[own]
            stored = file.tensors[name]
            digest.update(msgspec.json.encode([own, stored.dtype, stored.shape]))
            for start, count in _samples(stored):
                sample = bytearray(count)
                file.read_part(name, start, sample)
                digest.update(sample)
    return digest.hexdigest()


def _samples(stored: StoredTensor) -> list[tuple[int, int]]:
    """Return the first byte and the number of bytes of every sample, spread over the tensor."""
    step = max(_SAMPLE_BYTES, stored.nbytes // _SAMPLES)
    return [(start, min(_SAMPLE_BYTES, stored.nbytes - start)) for start in range(0, stored.nbytes, step)]
