"""Arenas: what is given back is really gone, and what was kept comes back as it was."""

import fcntl
import mmap
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from baton.engines.torch.arena import Arena, arena_bytes, available_bytes, use_device  # noqa: E402

CPU = torch.device("cpu")
MEGABYTE = 1 << 20


def resident_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def filled(directory: Path, floats: int = 1000) -> tuple[Arena, "torch.Tensor", "torch.Tensor"]:
    arena = Arena(arena_bytes((floats,), torch.float32) + arena_bytes((3, 5), torch.bfloat16), CPU, directory)
    first, second = arena.carve((floats,), torch.float32), arena.carve((3, 5), torch.bfloat16)
    first.copy_(torch.arange(floats))
    second.fill_(7)
    return arena, first, second


def test_tensors_of_an_arena_do_not_overlap_and_start_zeroed(tmp_path: Path) -> None:
    arena = Arena(2 * arena_bytes((5,), torch.float32), CPU, tmp_path)
    first, second = arena.carve((5,), torch.float32), arena.carve((5,), torch.float32)
    first.fill_(1)
    assert second.tolist() == [0] * 5
    assert (second.data_ptr() - first.data_ptr()) % 64 == 0


def test_released_memory_leaves_the_process_and_kept_content_is_restored(tmp_path: Path) -> None:
    size = 200 * MEGABYTE
    arena = Arena(size, CPU, tmp_path)
    tensor = arena.carve((size // 4,), torch.float32)
    tensor.copy_(torch.arange(size // 4))
    full = resident_bytes()
    arena.release(keep=True)
    assert full - resident_bytes() > 0.9 * size
    assert not list(tmp_path.iterdir()), "the file has no name, so nothing is left behind whatever happens"
    arena.resume()
    assert bool((tensor == torch.arange(size // 4)).all())


def test_content_that_is_not_kept_is_zero_and_uses_no_memory_before_access(tmp_path: Path) -> None:
    size = 200 * MEGABYTE
    arena = Arena(size, CPU, tmp_path)
    tensor = arena.carve((size,), torch.uint8)
    tensor.fill_(1)
    full = resident_bytes()
    arena.release(keep=False)
    arena.resume()
    assert full - resident_bytes() > 0.9 * size
    assert not tensor.any()


def test_releasing_and_resuming_twice_changes_nothing(tmp_path: Path) -> None:
    arena, first, second = filled(tmp_path)
    arena.resume()
    arena.release(keep=True)
    arena.release(keep=False)
    assert arena.released
    arena.resume()
    arena.resume()
    assert not arena.released
    assert first.tolist() == list(range(1000))
    assert second.tolist() == [[7] * 5] * 3


def test_memory_can_be_released_repeatedly(tmp_path: Path) -> None:
    arena, first, _ = filled(tmp_path)
    descriptors = len(os.listdir("/proc/self/fd"))
    for turn in range(5):
        first.fill_(turn)
        arena.release(keep=True)
        arena.resume()
        assert first.tolist() == [turn] * 1000
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_content_that_cannot_be_kept_is_not_released(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    arena, first, _ = filled(file / "spill")
    with pytest.raises(OSError):
        arena.release(keep=True)
    assert not arena.released
    assert first.tolist() == list(range(1000))


def test_closing_a_released_arena_closes_its_file(tmp_path: Path) -> None:
    arena, _, _ = filled(tmp_path)
    descriptors = len(os.listdir("/proc/self/fd"))
    arena.release(keep=True)
    arena.close()
    arena.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_shared_memory_can_be_mapped_by_its_descriptor_and_has_a_fixed_length(tmp_path: Path) -> None:
    arena = Arena(2 * MEGABYTE, CPU, tmp_path, shared=True)
    tensor = arena.carve((2 * MEGABYTE,), torch.uint8)
    assert arena.descriptor is not None
    with mmap.mmap(arena.descriptor, 2 * MEGABYTE, prot=mmap.PROT_READ) as other:
        tensor[MEGABYTE:].fill_(9)
        assert other[MEGABYTE - 1 : MEGABYTE + 1] == b"\0\x09"
    for length in (MEGABYTE, 3 * MEGABYTE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.descriptor, length)
    assert fcntl.fcntl(arena.descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    arena.close()


def test_released_shared_memory_is_freed_and_zero_at_the_same_address_after_resume(tmp_path: Path) -> None:
    size = 100 * MEGABYTE
    arena = Arena(size, CPU, tmp_path, shared=True)
    tensor = arena.carve((size,), torch.uint8)
    tensor.fill_(1)
    assert arena.descriptor is not None
    address, full = tensor.data_ptr(), resident_bytes()
    assert os.fstat(arena.descriptor).st_blocks * 512 >= size
    with mmap.mmap(arena.descriptor, size, prot=mmap.PROT_READ) as other:
        arena.release(keep=False)
        assert os.fstat(arena.descriptor).st_blocks * 512 < 0.01 * size
        assert full - resident_bytes() > 0.9 * size
        arena.resume()
        assert not tensor.any()
        tensor[:3].fill_(5)
        assert tensor.data_ptr() == address
        assert other[:4] == b"\5\5\5\0"
    arena.close()


def test_a_closed_shared_arena_keeps_its_tensors_and_no_descriptor(tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    arena = Arena(MEGABYTE, CPU, tmp_path, shared=True)
    tensor = arena.carve((MEGABYTE,), torch.uint8)
    arena.release(keep=False)
    arena.resume()
    assert arena.descriptor is not None, "only the end of the arena ends the sharing"
    arena.close()
    arena.close()
    assert arena.descriptor is None
    assert not tensor.any()
    del arena, tensor
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_available_bytes_is_positive_on_this_machine() -> None:
    assert available_bytes(CPU) > 0


def test_a_numbered_gpu_becomes_the_current_one_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches kernels on the current device, and graphs are captured there."""
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    for name in ("cpu", "cuda", "cuda:1"):
        use_device(torch.device(name))
    assert used == [torch.device("cuda:1")]
