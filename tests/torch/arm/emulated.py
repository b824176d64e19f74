"""The native step compiled for 64-bit ARM and run by QEMU: see driver.cpp."""

import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.engines.torch.experts.slots import ExpertSlots
from baton.engines.torch.models.config import LlamaConfig
from baton.engines.torch.models.llama import Weights
from baton.engines.torch.native.decoder import Rows, checked_tensors, shape_of
from baton.engines.torch.native.library import FLAGS, SOURCES

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
DRIVER = Path(__file__).with_name("driver.cpp")
LIMIT_S = 100


def build(directory: Path, target: str) -> Path:
    """Return the driver with the native step in it, for a CPU that the compiler calls `target`."""
    for command in (COMPILER, EMULATOR):
        if shutil.which(command) is None:
            pytest.skip(f"{command} is not installed; Debian has g++-aarch64-linux-gnu and qemu-user")
    program = directory / "driver"
    sources = [str(SOURCES[0]), str(DRIVER)]
    command = [COMPILER, "-std=c++17", "-static", *FLAGS, f"-march={target}", *sources, "-o", str(program)]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    return program


def compute(
    program: Path,
    config: LlamaConfig,
    weights: Weights,
    kv: Tensor,
    angles: tuple[Tensor, Tensor],
    steps: Sequence[Rows],
    slots: ExpertSlots | None = None,
) -> Tensor:
    """Return the logits of all rows of `steps`, one after the other, as an emulated ARM computes them."""
    tensors = checked_tensors(config, weights, kv.dtype, slots.shape.physical if slots else 0)
    table, counts, dynamic = slots.dispatch if slots else (None, None, False)
    width = table.shape[2] if table is not None else 1
    parts = [
        struct.pack("4i", 2, config.vocab, len(tensors), len(steps)),
        _part(bytes(shape_of(config, kv, len(angles[0]), slots))),
        *(_part(_content(tensor)) for tensor in (*tensors, kv, *angles, table, counts)),
        struct.pack("2i", width, dynamic),
    ]
    for rows in steps:
        numbers = [len(rows.tokens), rows.start, len(rows.table), 0, 0, rows.block, *rows.table, *rows.tokens]
        parts += [struct.pack("2i", 1, len(rows.tokens)), _part(struct.pack(f"{len(numbers)}i", *numbers))]
    run = subprocess.run([EMULATOR, str(program)], input=b"".join(parts), capture_output=True, timeout=LIMIT_S)
    assert run.returncode == 0, run.stderr.decode()
    return torch.frombuffer(bytearray(run.stdout), dtype=torch.float32).view(-1, config.vocab)


def _content(tensor: Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _part(content: bytes) -> bytes:
    return struct.pack("Q", len(content)) + content
