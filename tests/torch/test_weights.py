"""New weights in a running engine: it then answers as a fresh one on those weights, or nothing has changed at all."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import shared_memory
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from baton.engines.torch.loader import load_weights  # noqa: E402
from baton.engines.torch.models.config import read_llama_config  # noqa: E402
from baton.engines.torch.weights import gather  # noqa: E402
from baton.errors import BatonError, ConfigError, EngineDead, EngineFailed, InvalidRequest  # noqa: E402
from baton.protocol.commands import (  # noqa: E402
    Command,
    FromDisk,
    FromGroup,
    FromSharedMemory,
    FromTensors,
    InlineTensor,
    JoinGroup,
    LeaveGroup,
    ReleaseMemory,
    ResumeMemory,
    SharedTensor,
    TensorSpec,
    UpdateWeights,
    WeightSource,
)
from baton.testing import eventually, run_bounded  # noqa: E402
from tests.doubles.tiny_models import make_tiny_model  # noqa: E402
from tests.torch.torch_sessions import LONG, PROMPT, Session, fresh_answer, read, session  # noqa: E402

HEAD = "lm_head.weight"
Tensors = dict[str, "torch.Tensor"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("old"), seed=0)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("new"), seed=1)


@pytest.fixture(scope="module")
def new(other: Path) -> Tensors:
    return load_file(other / "model.safetensors")


def update(source: WeightSource, version: str = "2") -> UpdateWeights:
    return UpdateWeights(source=source, version=version)


def bytes_of(tensor: "torch.Tensor") -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def inline(tensors: Tensors) -> FromTensors:
    return FromTensors(
        tensors=tuple(
            InlineTensor(name=name, dtype="float32", shape=tuple(tensor.shape), data=bytes_of(tensor))
            for name, tensor in tensors.items()
        )
    )


def specs(tensors: Tensors) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name=name, dtype="float32", shape=tuple(t.shape)) for name, t in tensors.items())


@contextmanager
def segment(tensors: Tensors) -> Iterator[FromSharedMemory]:
    """ReplaceWeights tensors into shared memory, one after the other."""
    memory = shared_memory.SharedMemory(create=True, size=sum(tensor.nbytes for tensor in tensors.values()))
    places, offset = [], 0
    for name, tensor in tensors.items():
        memory.buf[offset : offset + tensor.nbytes] = bytes_of(tensor)
        places.append(SharedTensor(name=name, dtype="float32", shape=tuple(tensor.shape), offset=offset))
        offset += tensor.nbytes
    try:
        yield FromSharedMemory(segment=memory.name, tensors=tuple(places))
    finally:
        memory.close()
        memory.unlink()


async def assert_now_as(here: Session, expected: list[int], source: WeightSource) -> None:
    """Update, and find the answers of a fresh engine, with nothing remembered of the old one."""
    assert await here.generate() != expected
    assert await here.cached() == 32
    outcome = await here.execute(update(source))
    assert outcome.weight_version == "2"
    assert await here.cached() == 0
    await eventually(lambda: here.clears() == 1)
    assert await here.generate() == expected


async def assert_refused(here: Session, source: WeightSource, complaint: str, kind: type[BatonError]) -> None:
    """An update is refused, and nothing has changed."""
    before = await here.generate(tokens=8)
    with pytest.raises(kind, match=complaint):
        await here.execute(update(source))
    assert await here.cached() == 32
    assert await here.generate(tokens=8) == before
    assert here.clears() == 0


@pytest.mark.parametrize("native", [True, False])
def test_from_disk(model: Path, other: Path, native: bool) -> None:
    async def body() -> None:
        expected = await fresh_answer(other, native=native)
        async with session(model, native=native) as here:
            await assert_now_as(here, expected, FromDisk(path=str(other)))

    run_bounded(body())


def test_from_inline_tensors(model: Path, other: Path, new: Tensors) -> None:
    async def body() -> None:
        expected = await fresh_answer(other)
        async with session(model) as here:
            await assert_now_as(here, expected, inline(new))

    run_bounded(body())


def test_from_shared_memory_which_its_owner_keeps(model: Path, other: Path, new: Tensors) -> None:
    async def body() -> None:
        expected = await fresh_answer(other)
        with segment(new) as source:
            async with session(model) as here:
                await assert_now_as(here, expected, source)
            assert os.path.exists(f"/dev/shm/{source.segment}")  # noqa: ASYNC240

    run_bounded(body())


def test_equivalent_config_files_are_accepted(model: Path, other: Path, tmp_path: Path) -> None:
    older = tmp_path / "older"
    shutil.copytree(other, older, ignore=shutil.ignore_patterns("spill"))
    config = json.loads((older / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    (older / "config.json").write_text(json.dumps({**config, "rope_theta": theta, "max_position_embeddings": 512}))

    async def body() -> None:
        expected = await fresh_answer(other)
        async with session(model) as here:
            await assert_now_as(here, expected, FromDisk(path=str(older)))

    run_bounded(body())


def test_some_of_the_weights_can_be_replaced(model: Path, new: Tensors, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(model, mixed, ignore=shutil.ignore_patterns("spill"))
    save_file({**load_file(model / "model.safetensors"), HEAD: new[HEAD]}, mixed / "model.safetensors")

    async def body() -> None:
        expected = await fresh_answer(mixed)
        async with session(model) as here:
            await assert_now_as(here, expected, inline({HEAD: new[HEAD]}))

    run_bounded(body())


def test_other_dtypes_are_converted(model: Path, new: Tensors, tmp_path: Path) -> None:
    halves = tmp_path / "halves"
    shutil.copytree(model, halves, ignore=shutil.ignore_patterns("spill"))
    short = {name: tensor.to(torch.bfloat16) for name, tensor in new.items()}
    save_file(short, halves / "model.safetensors")
    source = FromTensors(
        tensors=tuple(
            InlineTensor(name=name, dtype="bfloat16", shape=tuple(tensor.shape), data=bytes_of(tensor))
            for name, tensor in short.items()
        )
    )

    async def body() -> None:
        expected = await fresh_answer(halves)
        async with session(model) as here:
            await assert_now_as(here, expected, source)

    run_bounded(body())


def test_running_requests_continue_with_the_new_weights(model: Path, other: Path) -> None:
    async def body() -> None:
        async with session(other) as there, session(model) as here:
            _, stream = here.start(PROMPT, LONG)
            start, _ = await read(stream, at_least=3)
            await here.execute(update(FromDisk(path=str(other))))
            end, finished = await read(stream)
            assert finished is not None
            assert len(start + end) == LONG
            # From some position on the tokens are those of a new engine with the new weights.
            tail = (start + end)[-200:]
            assert await there.generate(PROMPT + tuple((start + end)[:-200]), 200) == tail

    run_bounded(body(), 40)


def test_updated_weights_survive_a_release(model: Path, other: Path) -> None:
    async def body() -> None:
        expected = await fresh_answer(other)
        async with session(model) as here:
            await here.execute(ReleaseMemory(tags=("kv_cache", "weights")))
            await here.execute(ResumeMemory(tags=("weights",)))
            await here.execute(update(FromDisk(path=str(other))))
            await here.execute(ResumeMemory(tags=("kv_cache",)))
            assert await here.generate() == expected
            await here.execute(ReleaseMemory(tags=("kv_cache", "weights")))
            await here.execute(ResumeMemory(tags=("kv_cache", "weights")))
            assert await here.generate() == expected

    run_bounded(body())


def with_dtype(whole: bytes, name: str, dtype: str) -> bytes:
    """Return a safetensors file whose header gives a tensor another type than its data has."""
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header[name]["dtype"] = dtype
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + whole[8 + length :]


def broken_directories(model: Path, other: Path, new: Tensors, place: Path) -> dict[str, Path]:
    """Return broken directories, by the expected error message."""
    whole = (other / "model.safetensors").read_bytes()
    mutilated = {name: tensor for name, tensor in new.items() if name != "model.norm.weight"}
    contents: dict[str, bytes | Tensors] = {
        "is cut off": whole[: len(whole) // 2],
        "header cannot be read": b"\x10\0\0\0\0\0\0\0not json at all" + whole[30:],
        "model.norm.weight is missing": mutilated,
        "strange.weight is not a tensor": {**new, "strange.weight": torch.zeros(3)},
        r"has shape \[3\]": {**new, "model.norm.weight": torch.zeros(3)},
        "file ends at byte": whole[:5],
        "header would have": b"\xff" * 8 + whole[8:],
        "do not fit its shape": with_dtype(whole, HEAD, "BF16"),
        "is of type I32": {**new, HEAD: new[HEAD].to(torch.int32)},
    }
    directories = {}
    for number, (complaint, content) in enumerate(contents.items()):
        directory = directories[complaint] = place / str(number)
        directory.mkdir()
        if isinstance(content, bytes):
            (directory / "model.safetensors").write_bytes(content)
        else:
            save_file(content, directory / "model.safetensors")
    directories["is not a directory"] = place / "nowhere"
    directories["has neither"] = place
    another = directories["differs in positions"] = place / "another"
    shutil.copytree(other, another, ignore=shutil.ignore_patterns("spill"))
    config = json.loads((another / "config.json").read_text())
    (another / "config.json").write_text(json.dumps({**config, "rope_theta": 7.0, "rope_parameters": None}))
    return directories


def test_a_directory_that_does_not_fit_changes_nothing(model: Path, other: Path, new: Tensors, tmp_path: Path) -> None:
    directories = broken_directories(model, other, new, tmp_path)

    async def body() -> None:
        async with session(model) as here:
            for complaint, directory in directories.items():
                await assert_refused(here, FromDisk(path=str(directory)), complaint, InvalidRequest)

    run_bounded(body())


def test_tensors_that_do_not_fit_change_nothing(model: Path, new: Tensors) -> None:
    good = inline({"model.norm.weight": new["model.norm.weight"]}).tensors
    head = inline({HEAD: new[HEAD]}).tensors[0]
    bad = {
        "the list is empty": (),
        "given twice": (*good, *good),
        "nobody is not a tensor": (*good, InlineTensor(name="nobody", dtype="float32", shape=(1,), data=b"\0" * 4)),
        r"has shape \[4\]": (*good, InlineTensor(name=HEAD, dtype="float32", shape=(4,), data=b"\0" * 16)),
        "bytes of data": (*good, InlineTensor(name=HEAD, dtype="float32", shape=head.shape, data=head.data[:-4])),
    }

    async def body() -> None:
        async with session(model) as here:
            for complaint, tensors in bad.items():
                await assert_refused(here, FromTensors(tensors=tensors), complaint, InvalidRequest)

    run_bounded(body())


def test_a_segment_that_does_not_fit_changes_nothing(model: Path, new: Tensors) -> None:
    async def body() -> None:
        async with session(model) as here:
            with segment({"model.norm.weight": new["model.norm.weight"], HEAD: new[HEAD]}) as source:
                norm, head = source.tensors
                beyond = SharedTensor(name=HEAD, dtype="float32", shape=head.shape, offset=head.offset + 4)
                crooked = SharedTensor(name=HEAD, dtype="float32", shape=head.shape, offset=head.offset - 1)
                bad = {"beyond the segment": (norm, beyond), "not aligned to its dtype": (norm, crooked)}
                for complaint, tensors in bad.items():
                    changed = FromSharedMemory(segment=source.segment, tensors=tensors)
                    await assert_refused(here, changed, complaint, InvalidRequest)
                for name, complaint in (("nobody", "cannot be opened"), ("..", "not a segment")):
                    changed = FromSharedMemory(segment=name, tensors=source.tensors)
                    await assert_refused(here, changed, complaint, InvalidRequest)

    run_bounded(body())


Parts = dict[str, "torch.Tensor"]


@pytest.fixture
def parts(model: Path) -> Parts:
    return load_file(model / "model.safetensors")


def equal(parts: Parts, tensors: Tensors) -> bool:
    return all(torch.equal(parts[name], tensor) for name, tensor in tensors.items())


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(parts: Parts, other: Path, tmp_path: Path) -> None:
    shutil.copy(other / "model.safetensors", tmp_path)
    read: list[int] = []

    def cut_off(done: int, total: int) -> None:
        read.append(done)
        os.truncate(tmp_path / "model.safetensors", 4096)

    with pytest.raises(ConfigError, match="cannot be read: the file ends"):
        load_weights(tmp_path, parts, cut_off)
    assert read, "it was intact when reading began"


def test_files_that_vanish_before_the_weights_are_replaced_do_no_harm(
    model: Path, other: Path, new: Tensors, parts: Parts, tmp_path: Path
) -> None:
    before = {name: tensor.clone() for name, tensor in parts.items()}
    shutil.copytree(other, tmp_path / "next", ignore=shutil.ignore_patterns("spill"))
    replace = gather(FromDisk(path=str(tmp_path / "next")), parts, read_llama_config(model), None)
    os.truncate(tmp_path / "next" / "model.safetensors", 4096)
    assert equal(parts, before), "nothing is replaced before the function is called"
    assert replace() == len(parts)
    assert equal(parts, new)


def test_a_segment_that_is_cut_off_before_the_weights_are_replaced_does_no_harm(
    model: Path, new: Tensors, parts: Parts
) -> None:
    with segment(new) as source:
        replace = gather(source, parts, read_llama_config(model), None)
        os.truncate(f"/dev/shm/{source.segment}", 0)
        assert replace() == len(new)
    assert equal(parts, new)


def test_weights_replaced_only_in_part_end_the_engine(model: Path, new: Tensors, parts: Parts) -> None:
    replace = gather(inline(new), parts, read_llama_config(model), None)
    last = parts[list(new)[-1]]
    last.resize_(1)
    with pytest.raises(EngineDead, match="only in part"):
        replace()


SENDER = """
import sys
from datetime import timedelta
import torch.distributed as dist
from safetensors.torch import load_file
port, path, count = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2,
                        timeout=timedelta(seconds=30))
print("joined", flush=True)
names = sys.stdin.readline().split()
tensors = load_file(path)
for name in names[: int(count)]:
    dist.broadcast(tensors[name], src=0)
if int(count) < len(names):
    import os
    os._exit(0)
sys.stdin.readline()
"""


@contextmanager
def sender(other: Path, port: int, count: int) -> Iterator[subprocess.Popen[str]]:
    """Run a process that is rank 0 and broadcasts some of its tensors, and exits early if those are not all."""
    process = subprocess.Popen(
        [sys.executable, "-c", SENDER, str(port), str(other / "model.safetensors"), str(count)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def test_from_a_process_group(model: Path, other: Path, new: Tensors) -> None:
    async def body() -> None:
        expected = await fresh_answer(other)
        port = free_port()
        with sender(other, port, len(new)) as process:
            async with session(model) as here:
                join = JoinGroup(group="trainer", host="127.0.0.1", port=port, rank=1, size=2, timeout_s=30)
                await here.execute(join)
                with pytest.raises(InvalidRequest, match="already in 'trainer'"):
                    await here.execute(join)
                with pytest.raises(InvalidRequest, match="not in 'others'"):
                    await here.execute(update(FromGroup(group="others", tensors=specs(new))))
                tell(process, " ".join(new))
                await assert_now_as(here, expected, FromGroup(group="trainer", tensors=specs(new), timeout_s=20))
                await here.execute(LeaveGroup(group="trainer"))
                with pytest.raises(InvalidRequest, match="not in"):
                    await here.execute(LeaveGroup(group="trainer"))

    run_bounded(body(), 60)


@pytest.mark.parametrize("dies", [True, False], ids=["peer dies", "peer is silent"])
@pytest.mark.slow
def test_a_failed_broadcast_changes_nothing(model: Path, other: Path, new: Tensors, dies: bool) -> None:
    async def body() -> None:
        async with session(model) as here:
            for _ in range(2):  # the group that broke has been left, and another can be joined
                port = free_port()
                with sender(other, port, 3) as process:
                    await here.execute(
                        JoinGroup(group="trainer", host="127.0.0.1", port=port, rank=1, size=2, timeout_s=30)
                    )
                    if dies:
                        tell(process, " ".join(new))
                    source = FromGroup(group="trainer", tensors=specs(new), timeout_s=2)
                    async with asyncio.timeout(15):
                        await assert_refused(here, source, "join it again", EngineFailed)

    run_bounded(body(), 60)


def test_a_failed_join_changes_nothing(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            before = await here.generate()
            lonely = JoinGroup(group="g", host="127.0.0.1", port=free_port(), rank=1, size=2, timeout_s=1)
            for _ in range(2):
                with pytest.raises(EngineFailed, match="could not be joined"):
                    await here.execute(lonely)
            with pytest.raises(InvalidRequest, match="no rank 2"):
                await here.execute(JoinGroup(group="g", host="127.0.0.1", port=1, rank=2, size=2))
            assert await here.generate() == before

    run_bounded(body(), 60)


def test_requests_are_served_while_the_engine_waits_for_a_trainer(model: Path, other: Path, new: Tensors) -> None:
    async def body() -> None:
        async with session(model) as here:
            port = free_port()
            joining = asyncio.create_task(
                here.execute(JoinGroup(group="trainer", host="127.0.0.1", port=port, rank=1, size=2, timeout_s=30))
            )
            await asyncio.sleep(0.2)
            before = await here.generate()
            assert not joining.done()
            with sender(other, port, len(new)):
                await joining
                source = FromGroup(group="trainer", tensors=specs(new), timeout_s=2)
                updating = asyncio.create_task(here.execute(update(source)))
                await asyncio.sleep(0.2)
                assert await here.generate() == before
                assert not updating.done()
                with pytest.raises(EngineFailed):
                    await updating

    run_bounded(body(), 60)


@pytest.mark.parametrize("waits", ["to join", "for tensors"])
def test_an_engine_stops_at_once_while_it_waits_for_a_trainer(
    model: Path, other: Path, new: Tensors, waits: str
) -> None:
    async def body() -> None:
        port = free_port()
        join = JoinGroup(group="trainer", host="127.0.0.1", port=port, rank=1, size=2, timeout_s=10)
        with sender(other, port, len(new)) if waits == "for tensors" else nullcontext():
            async with session(model) as here:
                if waits == "for tensors":
                    await here.execute(join)
                    command: Command = update(FromGroup(group="trainer", tensors=specs(new), timeout_s=3))
                else:
                    command = msgspec.structs.replace(join, timeout_s=3)
                order = asyncio.create_task(here.execute(command))
                await asyncio.sleep(0.2)
                async with asyncio.timeout(2):
                    await here.engine.stop()
            with pytest.raises((EngineFailed, EngineDead)):
                await order
        await eventually(lambda: not torch.distributed.is_initialized())

    run_bounded(body(), 60)


@pytest.mark.slow
def test_an_engine_that_stops_leaves_its_group(model: Path, other: Path, new: Tensors) -> None:
    async def body() -> None:
        for _ in range(2):
            port = free_port()
            with sender(other, port, len(new)):
                async with session(model) as here:
                    await here.execute(
                        JoinGroup(group="trainer", host="127.0.0.1", port=port, rank=1, size=2, timeout_s=30)
                    )

    run_bounded(body(), 60)
