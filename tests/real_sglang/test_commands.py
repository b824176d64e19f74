"""What an operator asks of the real SGLang: pauses, weights, the cache, profiles. What it refuses changes nothing."""

import asyncio
import json
import multiprocessing.shared_memory
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.errors import EngineDead, EngineFailed, InvalidRequest, Paused
from baton.protocol.commands import (
    ClearCache,
    Continue,
    FromDisk,
    FromSharedMemory,
    FromTensors,
    InlineTensor,
    JoinGroup,
    LeaveGroup,
    ListLoras,
    LoadLora,
    Pause,
    SetWeightVersion,
    SharedTensor,
    StartProfile,
    StopProfile,
    UnloadLora,
    UpdateWeights,
)
from baton.testing.engine_session import Session, read_to_the_end
from tests.real_sglang.engines import Bench, TestedEngine
from tests.real_sglang.hardware import GROUP_BACKEND, HIDDEN, LORA_BACKEND, QUERIES, VALUES, tiny_model
from tests.real_sglang.test_generating import Engines, answer_of, work


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return tiny_model(tmp_path_factory.mktemp("other"), seed=7, num_hidden_layers=2)


@pytest.fixture
def engine(bench: Bench, tiny: Path) -> Engines:
    return Engines(bench, lambda: TestedEngine(tiny, group_backend=GROUP_BACKEND))


async def update(session: Session, source: Any, version: str = "v") -> Any:
    return await session.engine.execute(UpdateWeights(source=source, version=version))


def tensor_of(model: Path, name: str) -> Any:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")[name]


def test_a_pause_that_ends_requests_says_that_it_was_one(engine: Engines) -> None:
    async def body(session: Session) -> None:
        streams = [session.engine.submit(work(1000)) for _ in range(6)]
        await streams[0].read()
        outcome = await session.engine.execute(Pause(mode="abort"))
        assert outcome.requests == 6
        for stream in streams:
            with pytest.raises(Paused):
                await read_to_the_end(stream)
        late = session.engine.submit(work(4))
        await asyncio.sleep(0.3)
        assert session.busy() == 1
        await session.engine.execute(Continue())
        assert len((await read_to_the_end(late)).tokens[0]) == 4
        await session.as_at_the_start(20)

    engine.run(body)


def test_weights_from_disk_change_the_answer_and_running_requests_go_on(
    engine: Engines, tiny: Path, other: Path
) -> None:
    async def body(session: Session) -> None:
        before, _, _ = await answer_of(session, work(24))
        assert (await answer_of(session, work(24)))[1].cached_tokens == 32, "the prompt is in the cache"
        running = session.engine.submit(work(600, prompt=tuple(range(200, 240))))
        await running.read()
        outcome = await update(session, FromDisk(path=str(other)), "second")
        assert outcome.weight_version == "second"
        answer = await read_to_the_end(running)
        assert answer.ends[0] is not None
        after, end, _ = await answer_of(session, work(24))
        assert after != before
        assert end.cached_tokens == 0, "nothing of the old weights is reused"
        await update(session, FromDisk(path=str(tiny)), "first")
        back, end, _ = await answer_of(session, work(24))
        assert (back, end.cached_tokens) == (before, 0)

    engine.run(body)


@pytest.mark.parametrize("fault", ["shape", "lacks", "nowhere", "rubbish"])
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(
    engine: Engines, other: Path, tmp_path: Path, fault: str
) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    if fault != "nowhere":
        shutil.copytree(other, broken)
        tensors = load_file(broken / "model.safetensors")
        name = "model.layers.1.mlp.down_proj.weight"
        if fault == "shape":
            tensors[name] = tensors[name][:, :-1].contiguous()
        elif fault == "lacks":
            del tensors[name]
        save_file(tensors, broken / "model.safetensors", {"format": "pt"})
        if fault == "rubbish":
            (broken / "model.safetensors").write_bytes(b"\xff" * 64)

    async def body(session: Session) -> None:
        before, _, _ = await answer_of(session, work(24))
        with pytest.raises(InvalidRequest, match="path"):
            await update(session, FromDisk(path=str(broken)))
        assert (await answer_of(session, work(24)))[0] == before

    engine.run(body)


@pytest.mark.parametrize("transport", ["tensors", "shared_memory"])
def test_single_tensors_change_the_answer(engine: Engines, tiny: Path, other: Path, transport: str) -> None:
    name = "lm_head.weight"

    async def put(session: Session, model: Path) -> None:
        tensor = tensor_of(model, name)
        data = tensor.numpy().tobytes()
        shape = tuple(tensor.shape)
        if transport == "tensors":
            inline = InlineTensor(name=name, dtype="float32", shape=shape, data=data)
            await update(session, FromTensors(tensors=(inline,)), "tensor")
            return
        segment = multiprocessing.shared_memory.SharedMemory(create=True, size=len(data) + 64)
        try:
            segment.buf[64 : 64 + len(data)] = data
            shared = SharedTensor(name=name, dtype="float32", shape=shape, offset=64)
            await update(session, FromSharedMemory(segment=segment.name, tensors=(shared,)), "segment")
        finally:
            segment.close()
            segment.unlink()

    async def body(session: Session) -> None:
        before, _, _ = await answer_of(session, work(24))
        await put(session, other)
        assert (await answer_of(session, work(24)))[0] != before
        wrong = InlineTensor(name=name, dtype="float32", shape=(2, 2), data=b"\0" * 16)
        with pytest.raises(InvalidRequest, match="shape"):
            await update(session, FromTensors(tensors=(wrong,)))
        await put(session, tiny)
        assert (await answer_of(session, work(24)))[0] == before

    engine.run(body)


def test_a_new_name_for_the_weights_touches_no_request(engine: Engines) -> None:
    async def body(session: Session) -> None:
        stream = session.engine.submit(work(400))
        await stream.read()
        assert (await session.engine.execute(SetWeightVersion(version="named"))).weight_version == "named"
        assert (await read_to_the_end(stream)).ends[0] is not None

    engine.run(body)


def test_a_cleared_cache_reuses_nothing(engine: Engines) -> None:
    async def body(session: Session) -> None:
        prompt = tuple(range(10, 90))
        await answer_of(session, work(2, prompt=prompt))
        assert (await answer_of(session, work(2, prompt=prompt)))[1].cached_tokens == 64
        running = session.engine.submit(work(300))
        await running.read()
        await session.engine.execute(ClearCache())
        assert (await answer_of(session, work(2, prompt=prompt)))[1].cached_tokens == 0
        assert len((await read_to_the_end(running)).ends) == 1

    engine.run(body)


def test_a_profile_is_written_where_it_was_asked_for(engine: Engines, tmp_path: Path) -> None:
    async def body(session: Session) -> None:
        with pytest.raises(InvalidRequest):
            await session.engine.execute(StopProfile())
        outcome = await session.engine.execute(StartProfile(directory=str(tmp_path)))
        assert outcome.path == str(tmp_path)
        await answer_of(session, work(4))
        await session.engine.execute(StopProfile())

    engine.run(body)
    assert list(tmp_path.iterdir())


def test_leaving_a_group_that_was_not_joined_is_refused(engine: Engines) -> None:
    async def body(session: Session) -> None:
        with pytest.raises(InvalidRequest, match="not in"):
            await session.engine.execute(LeaveGroup(group="other"))

    engine.run(body)


def test_weights_come_through_a_group(engine: Engines, tiny: Path, other: Path) -> None:
    import sys

    from baton.engines.sglang.tcp_ports import free_port
    from baton.protocol.commands import FromGroup, TensorSpec

    name, port = "lm_head.weight", free_port("127.0.0.1")
    shape = tuple(tensor_of(other, name).shape)
    sender = Path(__file__).parent / "send_weights.py"

    async def body(session: Session) -> None:
        before, _, _ = await answer_of(session, work(24))
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(sender), GROUP_BACKEND, str(port), name, str(other), str(tiny)
        )
        joined = JoinGroup(group="trainer", host="127.0.0.1", port=port, rank=1, size=2, timeout_s=60)
        await session.engine.execute(joined)
        spec = TensorSpec(name=name, dtype="float32", shape=shape)
        await update(session, FromGroup(group="trainer", tensors=(spec,)), "broadcast")
        assert (await answer_of(session, work(24)))[0] != before
        await update(session, FromGroup(group="trainer", tensors=(spec,)), "back")
        assert (await answer_of(session, work(24)))[0] == before
        with pytest.raises(InvalidRequest):
            await session.engine.execute(joined)
        process.kill()
        await process.wait()
        with pytest.raises(EngineFailed, match="left the group"):
            await update(session, FromGroup(group="trainer", tensors=(spec,)), "lost")
        assert (await answer_of(session, work(24)))[0] == before, "the weights stay"
        with pytest.raises(InvalidRequest, match="not in"):
            await session.engine.execute(LeaveGroup(group="trainer"))
        await update(session, FromDisk(path=str(tiny)), "first")

    engine.run(body)


def test_a_group_that_does_not_come_together_ends_the_engine(bench: Bench, engine: Engines) -> None:
    """SGLang waits for it in its scheduler, and cannot be told to stop."""

    async def body(session: Session) -> None:
        running = session.engine.submit(work(2000))
        await running.read()
        alone = JoinGroup(group="alone", host="127.0.0.1", port=9, rank=1, size=2, timeout_s=2)
        with pytest.raises(EngineDead, match="restarts"):
            await session.engine.execute(alone)
        with pytest.raises(EngineDead, match="restarts"):
            await read_to_the_end(running)
        with pytest.raises(EngineDead):
            session.engine.submit(work(1))
        await session.engine.stop()

    engine.run(body)


LORA = (
    *("--enable-lora", "--max-lora-rank", "4", "--lora-target-modules", "q_proj", "v_proj"),
    *("--lora-backend", LORA_BACKEND),
)


def write_lora(directory: Path) -> Path:
    """Write a random adapter for the tiny model."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    tensors = {}
    for layer in range(2):
        for name, rows in (("q_proj", QUERIES), ("v_proj", VALUES)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(4, HIDDEN)
            tensors[f"{place}.lora_B.weight"] = torch.randn(rows, 4)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM", "lora_dropout": 0.0}))
    return directory


def test_adapters_come_serve_and_go(bench: Bench, tiny: Path, tmp_path: Path) -> None:
    lora, given = write_lora(tmp_path / "lora"), write_lora(tmp_path / "given")
    engine = Engines(bench, lambda: TestedEngine(tiny, "null", *LORA, "--lora-paths", f"given={given}"))

    async def body(session: Session) -> None:
        control = session.engine.execute
        assert session.info.adapters == ("given",)
        assert (await control(UnloadLora(name="given"))).adapters == ()
        plain, _, _ = await answer_of(session, work(12))
        assert (await control(LoadLora(name="fine", path=str(lora)))).adapters == ("fine",)
        tuned, end, _ = await answer_of(session, work(12, lora_name="fine"))
        assert tuned != plain
        assert end.cached_tokens == 0, "what another adapter has computed is not reused"
        assert (await answer_of(session, work(12)))[0] == plain
        for command in (
            LoadLora(name="fine", path=str(lora)),
            LoadLora(name="x", path="/nowhere"),
            UnloadLora(name="x"),
        ):
            with pytest.raises(InvalidRequest):
                await control(command)
        assert (await control(UnloadLora(name="fine"))).adapters == ()
        assert (await control(ListLoras())).adapters == ()
        with pytest.raises(InvalidRequest, match="lora_name"):
            session.engine.submit(work(2, lora_name="fine"))
        await session.engine.stop()

    engine.run(body, 150)
