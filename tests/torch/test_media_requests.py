"""Prompts with media in the built-in engine: the prefix cache, choices, preemption, KV events and handoffs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from baton.errors import InvalidRequest, PeerLost, Unsupported
from baton.ports.engine import Stream, Work
from baton.protocol.commands import ClearCache, Continue, FromDisk, FromTensors, InlineTensor, Pause, UpdateWeights
from baton.protocol.events import KvStored, RoutedRows
from baton.protocol.handoff import Produce
from baton.protocol.outputs import KvComputed
from baton.protocol.requests import OutputOptions, Sampling
from baton.testing import eventually, run_bounded
from baton.testing.handoff_session import CONSUME, read_block, wanted_by, write_block
from tests.torch.torch_sessions import Session, read, session
from tests.torch.vision_reference import Idefics3Reference, Picture, Prompt, QwenReference, words
from tests.vision_models import make_tiny_idefics3, make_tiny_qwen25vl

BLOCK = 4
IMAGE = Picture(1, (1, 4, 8))  # 8 rows
OTHER = Picture(2, (1, 4, 8))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, QwenReference]:
    directory = make_tiny_qwen25vl(tmp_path_factory.mktemp("qwen"))
    return directory, QwenReference(directory)


@asynccontextmanager
async def engine(directory: Path, tmp_path: Path, **options: Any) -> AsyncIterator[Session]:
    async with session(directory, tmp_path / "spill", block_size=BLOCK, **options) as here:
        yield here


async def tokens(here: Session, work: Work) -> tuple[list[int], int]:
    found, end = await read(here.engine.submit(work))
    assert end is not None
    return found, end.cached_tokens or 0


def test_the_engine_describes_the_rows_it_takes(model: tuple[Path, QwenReference], tmp_path: Path) -> None:
    directory, reference = model

    async def body() -> None:
        async with engine(directory, tmp_path) as here:
            assert here.engine.capabilities.media_embeddings
            media = here.info.media
            assert media is not None
            assert (media.shape.dtype, media.shape.size) == ("float32", 64)
            assert {kind: place.token for kind, place in media.placeholders.items()} == reference.pads
            assert all(place.token not in place.as_text for place in media.placeholders.values())

    run_bounded(body(), 60)


def test_the_same_picture_is_reused_and_another_one_never_is(model: tuple[Path, QwenReference], tmp_path: Path) -> None:
    directory, reference = model
    before, after = words(10), words(9, 1)
    one, two = reference.prompt(before, IMAGE, after), reference.prompt(before, OTHER, after)
    assert one.token_ids == two.token_ids

    async def body() -> None:
        async with engine(directory, tmp_path) as here:
            found = [await tokens(here, prompt.work()) for prompt in (one, two, one, two)]
        whole = (len(one.token_ids) - 1) // BLOCK * BLOCK
        assert [cached for _, cached in found] == [0, len(before) // BLOCK * BLOCK, whole, whole]
        expected = [reference.tokens(one), reference.tokens(two)]
        assert expected[0] != expected[1]
        assert [answer for answer, _ in found] == expected * 2

    run_bounded(body(), 60)


def test_the_same_tokens_without_media_share_no_block_with_a_picture(
    model: tuple[Path, QwenReference], tmp_path: Path
) -> None:
    directory, reference = model
    prompt = reference.prompt(IMAGE, words(9, 1))

    async def body() -> None:
        async with engine(directory, tmp_path) as here:
            await tokens(here, prompt.work())
            assert await here.cached(prompt.token_ids) == 0

    run_bounded(body(), 60)


def test_all_choices_of_a_request_see_the_picture(model: tuple[Path, QwenReference], tmp_path: Path) -> None:
    directory, reference = model
    prompt = reference.prompt(words(3), IMAGE, words(2, 1))

    async def body() -> None:
        for options in ({}, {"prefix_cache": False}):
            async with engine(directory, tmp_path, **options) as here:
                work = msgspec.structs.replace(prompt.work(), sampling=Sampling(temperature=0.0, n=3))
                found, _ = await read(here.engine.submit(work))
                assert sorted(found) == sorted(reference.tokens(prompt) * 3)

    run_bounded(body(), 60)


def test_a_preempted_request_computes_its_picture_again(model: tuple[Path, QwenReference], tmp_path: Path) -> None:
    directory, reference = model
    prompt = reference.prompt(words(3), IMAGE, words(20, 1))

    async def body() -> None:
        async with engine(directory, tmp_path, batch_tokens=6) as here:
            stream = here.engine.submit(prompt.work())
            found, _ = await read(stream, at_least=5)
            await here.execute(Pause(mode="retract"))
            await here.execute(ClearCache())
            await here.execute(Continue())
            more, _ = await read(stream)
            assert found + more == reference.tokens(prompt)

    run_bounded(body(), 60)


def test_kv_events_name_the_rows_of_pictures_that_routers_know(
    model: tuple[Path, QwenReference], tmp_path: Path
) -> None:
    directory, reference = model
    prompt = reference.prompt(words(5), IMAGE, words(7, 1))
    routed = prompt._replace(media=tuple(msgspec.structs.replace(one, routing_hash="ab") for one in prompt.media))

    async def body() -> None:
        async with engine(directory, tmp_path) as here:
            await tokens(here, routed.work(1))
            await eventually(lambda: any(isinstance(event, KvStored) for event in here.readings))
            stored = [event for event in here.readings if isinstance(event, KvStored)]
            assert [event.media for event in stored] == [(RoutedRows(5, 13, "ab"),)]
            assert stored[0].token_ids == prompt.token_ids[: len(stored[0].token_ids)]

    run_bounded(body(), 60)


async def hand_over(prefill: Session, decode: Session, prompt: Prompt, count: int = 20) -> tuple[Stream, int]:
    """Move the KV of a prompt; return the stream of the request that continues, and the first block that moved."""
    produced = prefill.engine.submit(prompt.work(1, handoff=Produce()))
    blocks: list[int] = []
    while outputs := await produced.read():
        blocks += [block for output in outputs if isinstance(output, KvComputed) for block in output.blocks]
    work = prompt.work(count, rows=False, handoff=CONSUME)
    stream = decode.engine.submit(work)
    wanted = await wanted_by(stream)
    assert prefill.info.kv is not None
    assert decode.info.kv is not None
    for theirs, mine in zip(blocks[wanted.first :], wanted.blocks, strict=True):
        write_block(decode.info.kv, mine, read_block(prefill.info.kv, theirs))
    decode.engine.received(work.request_id)
    return stream, wanted.first


def test_kv_of_a_prompt_with_media_moves_to_an_engine_without_their_rows(
    model: tuple[Path, QwenReference], tmp_path: Path
) -> None:
    directory, reference = model
    video = Picture(3, (3, 6, 4), 0.5)
    prompt = reference.prompt(words(6, 11), IMAGE, words(3, 1), video, words(6, 2))
    longer = reference.prompt(words(6, 11), IMAGE, words(3, 1), video, words(6, 2), words(8, 3))

    async def body() -> None:
        async with engine(directory, tmp_path / "p") as prefill, engine(directory, tmp_path / "d") as decode:
            stream, first = await hand_over(prefill, decode, prompt)
            assert first == 0
            assert (await read(stream))[0] == reference.tokens(prompt)
            # The decode engine finds by itself what it has received: both compute the same block hashes.
            stream, first = await hand_over(prefill, decode, longer)
            assert first == len(prompt.token_ids) // BLOCK
            assert (await read(stream))[0] == reference.tokens(longer)
            await eventually(lambda: _hashes(prefill) <= _hashes(decode))

    run_bounded(body(), 60)


def _hashes(here: Session) -> set[int]:
    return {name for event in here.readings if isinstance(event, KvStored) for name in event.block_hashes}


def test_a_consumer_that_lost_its_kv_fails_so_that_the_request_moves(
    model: tuple[Path, QwenReference], tmp_path: Path
) -> None:
    directory, reference = model
    prompt = reference.prompt(words(6), IMAGE, words(6, 2))

    async def body() -> None:
        async with engine(directory, tmp_path / "p") as prefill, engine(directory, tmp_path / "d") as decode:
            kept, _ = await hand_over(prefill, decode, prompt)
            found, _ = await read(kept, at_least=3)
            await decode.execute(Pause(mode="retract"))
            await decode.execute(Continue())
            assert (found + (await read(kept))[0]) == reference.tokens(prompt), "its blocks are still cached"
            lost, _ = await hand_over(prefill, decode, reference.prompt(words(7), IMAGE, words(6, 2)), 200)
            await read(lost, at_least=3)
            await decode.execute(Pause(mode="retract"))
            await decode.execute(ClearCache())
            await decode.execute(Continue())
            with pytest.raises(PeerLost, match="rows"):
                await asyncio.wait_for(read(lost), 30)
            await eventually(lambda: (load := decode.load()) is not None and load.used_blocks == 0)

    run_bounded(body(), 90)


def test_work_that_can_never_be_computed_is_refused(model: tuple[Path, QwenReference], tmp_path: Path) -> None:
    directory, reference = model
    prompt = reference.prompt(words(6), IMAGE, words(6, 2))
    ends_in_media = reference.prompt(words(6), IMAGE)
    consume = prompt.work(rows=False, handoff=CONSUME)
    endless = Picture(3, (2, 4, 4), 900.0)
    cases: list[tuple[Work, type[Exception]]] = [
        (prompt.work(rows=False), InvalidRequest),
        (ends_in_media.work(rows=False, handoff=CONSUME), InvalidRequest),
        (msgspec.structs.replace(consume, output=OutputOptions(prompt_logprobs=1)), Unsupported),
        (msgspec.structs.replace(prompt.work(), media=prompt.media * 2), InvalidRequest),
        (reference.prompt(endless, words(3)).work(), InvalidRequest),
    ]

    async def body() -> None:
        async with engine(directory, tmp_path) as here:
            for work, error in cases:
                with pytest.raises(error):
                    here.engine.submit(work)
            assert (await tokens(here, ends_in_media.work()))[0] == reference.tokens(ends_in_media)

    run_bounded(body(), 60)


def test_rows_are_converted_to_the_type_of_the_model(model: tuple[Path, QwenReference], tmp_path: Path) -> None:
    directory, reference = model
    prompt = reference.prompt(words(6), IMAGE, words(6, 2))

    async def body() -> None:
        async with engine(directory, tmp_path, dtype="bfloat16") as here:
            exact = [float(value) for value in range(-256, 256)]
            assert len(exact) == 8 * 64
            answers = []
            for name in ("float32", "bfloat16", "float16"):
                rows = torch.tensor(exact).to(getattr(torch, name)).view(torch.uint8).numpy().tobytes()
                item = msgspec.structs.replace(prompt.media[0], dtype=name, data=memoryview(rows))
                await here.execute(ClearCache())
                answers.append(await tokens(here, msgspec.structs.replace(prompt.work(), media=(item,))))
            assert answers[0] == answers[1] == answers[2]

    run_bounded(body(), 60)


def test_new_weights_have_the_names_of_the_files_and_those_of_the_tower_are_not_read(tmp_path: Path) -> None:
    old, new = (make_tiny_idefics3(tmp_path / name, seed) for seed, name in enumerate(("old", "new")))
    reference = Idefics3Reference(new)
    prompt = reference.prompt(words(6), Picture(1), words(6, 2))
    norm = reference.model.model.text_model.norm.weight.detach()
    named = InlineTensor(
        name="model.text_model.norm.weight", dtype="float32", shape=tuple(norm.shape), data=norm.numpy().tobytes()
    )

    async def body() -> None:
        async with engine(old, tmp_path) as here:
            await here.execute(UpdateWeights(source=FromTensors(tensors=(named,)), version="1"))
            await here.execute(UpdateWeights(source=FromDisk(path=str(new)), version="2"))
            assert (await tokens(here, prompt.work()))[0] == reference.tokens(prompt)
            tower = msgspec.structs.replace(named, name="model.vision_model.post_layernorm.weight")
            with pytest.raises(InvalidRequest, match="post_layernorm"):
                await here.execute(UpdateWeights(source=FromTensors(tensors=(tower,)), version="3"))

    run_bounded(body(), 60)
