"""Media in the real SGLang, with a tiny random Qwen2.5-VL: encoded by the engine itself, and by an encoder alone."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.config.engines import SglangOptions
from baton.engines.sglang.encoder import SglangEncoder
from baton.engines.sglang.preprocessing import Preprocessor
from baton.engines.sglang.vision_model import read_vision_model
from baton.errors import EngineDead, InvalidRequest, Unsupported
from baton.ports.engine import EncodedRows, EncodeEngine, EncodeWork, EngineInfo
from baton.protocol.ids import new_request_id
from baton.protocol.media import MediaFile
from tests.real_sglang.engines import Bench, TestedEngine
from tests.real_sglang.hardware import ON_GPU, SAME_ANSWERS, SMALL, exact_tower, needs_video
from tests.real_sglang.media_prompts import (
    FILES,
    PROMPTS,
    Parts,
    encode_work,
    files_of,
    placed,
    rendered,
    transformers_answers,
)
from tests.real_sglang.peer import media_order
from tests.real_sglang.peers import Peer
from tests.real_sglang.test_generating import answer_of, work
from tests.real_sglang.test_handoff import DECODE, NIXL
from tests.vision_models import make_tiny_qwen25vl

pytestmark = pytest.mark.timeout(1000)

TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen25vl(tmp_path_factory.mktemp("vl"), wide_heads=ON_GPU)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


Rows = dict[str, tuple[EncodedRows, ...]]


@pytest.fixture(scope="module")
def encoded(bench: Bench, model: Path) -> tuple[EngineInfo, Rows]:
    """What an encoder alone says of itself, and the rows of every prompt. It has ended: a process has one SGLang."""

    async def body() -> tuple[EngineInfo, Rows]:
        encoder = SglangEncoder(SglangOptions(metrics=False), SMALL, model, "tiny")
        info = await encoder.start()
        answers = await asyncio.gather(*(encoder.encode(encode_work(parts, FILES)) for parts in PROMPTS.values()))
        with pytest.raises(InvalidRequest, match="not an image"):
            await encoder.encode(broken_work())
        await encoder.stop()
        await encoder.stop()
        with pytest.raises(EngineDead):
            await encoder.encode(encode_work(PROMPTS["one image"], FILES))
        return info, dict(zip(PROMPTS, (answer.items for answer in answers), strict=True))

    return bench.run(body(), 600)


def broken_work() -> EncodeWork:
    broken = MediaFile(modality="image", data=b"no image")
    return EncodeWork(request_id=new_request_id("broken"), token_ids=(1,), media=(broken,))


async def answers_of(session: Any, parts: Parts, rows: tuple[EncodedRows, ...]) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many tokens of the prompt were cached."""
    prompt, media = placed(rendered(parts, FILES), rows)
    tokens, end, _ = await answer_of(session, work(TOKENS, prompt=prompt, media=media))
    return tokens, end.cached_tokens or 0


@pytest.fixture(scope="module")
def own_answers(bench: Bench, model: Path, encoded: object) -> dict[str, list[int]]:
    """The answers of an engine that encodes its media itself; what it caches is checked on the way."""

    async def body() -> dict[str, list[int]]:
        session = await bench.session(lambda: TestedEngine(model))
        engine = session.engine
        assert isinstance(engine, EncodeEngine)
        assert engine.capabilities.encoded_modalities == {"image", "video"}
        answers: dict[str, list[int]] = {}
        for name, parts in PROMPTS.items():
            rows = (await engine.encode(encode_work(parts, FILES))).items
            answers[name], cached = await answers_of(session, parts, rows)
            assert cached < 16, "no two prompts share a picture at their beginning"
        rows = (await engine.encode(encode_work(PROMPTS["images and text"], FILES))).items
        again, cached = await answers_of(session, PROMPTS["images and text"], rows)
        assert again == answers["images and text"]
        assert cached > 16, "the same pictures are found in the prefix cache"
        with pytest.raises(InvalidRequest, match="not an image"):
            await engine.encode(broken_work())
        await bench.stop_engine()
        return answers

    return bench.run(body(), 600)


@exact_tower
def test_an_engine_that_encodes_its_images_answers_as_transformers(
    model: Path, own_answers: dict[str, list[int]]
) -> None:
    # SGLang's tower attends over all frames of a video, that of transformers within each.
    images = {name: parts for name, parts in PROMPTS.items() if "@film" not in parts}
    assert {name: own_answers[name] for name in images} == transformers_answers(model, images, FILES, TOKENS)
    assert len(set(map(tuple, own_answers.values()))) == len(PROMPTS)


@needs_video
def test_videos_are_among_the_prompts() -> None:
    assert "@film" in PROMPTS["video"]


def test_rows_of_an_encoder_alone_give_the_same_answers(
    bench: Bench, model: Path, encoded: tuple[EngineInfo, Rows], own_answers: dict[str, list[int]]
) -> None:
    info, rows = encoded

    async def body() -> None:
        session = await bench.session(lambda: TestedEngine(model, from_encoders=True))
        assert session.info.media == info.media, "rows fit, and placeholders are the same"
        same = [
            (await answers_of(session, parts, rows[name]))[0] == own_answers[name] for name, parts in PROMPTS.items()
        ]
        assert sum(same) >= SAME_ANSWERS * len(same), same
        with pytest.raises(Unsupported, match="encode workers"):
            await session.engine.encode(encode_work(PROMPTS["one image"], FILES))  # type: ignore[attr-defined]

    bench.run(body(), 600)


def patches_of(model: Path, parts: Parts) -> tuple[EncodedRows, ...]:
    """Return the patches of the media of a prompt, as an engine that encodes them itself prepares them."""
    vision = read_vision_model(model)
    assert vision is not None
    preprocessor = Preprocessor(model, vision, "any")
    prepared = [preprocessor.prepare(file) for file in files_of(parts, FILES)]
    return tuple(
        EncodedRows(
            item=each.item,
            dtype="float32",
            size=vision.pixel_row_size,
            data=memoryview(each.pixels.numpy()).cast("B"),
        )
        for each in prepared
    )


def test_a_decode_engine_continues_without_the_media_of_its_prompt(
    bench: Bench, model: Path, own_answers: dict[str, list[int]]
) -> None:
    """Its items have no data: it needs their places, which decide the positions of the tokens that follow."""

    async def body() -> None:
        await bench.stop_engine()
        prefill, decode = await asyncio.gather(
            Peer.start(model, "prefill", *NIXL), Peer.start(model, "decode", *DECODE)
        )
        answers: dict[str, list[int]] = {}
        try:
            for room, (name, parts) in enumerate(PROMPTS.items(), 1):
                where = {"host": prefill.place["host"], "port": prefill.place["port"], "room": room}
                rows = patches_of(model, parts)
                prompt, media = placed(rendered(parts, FILES), rows)
                _, places = placed(rendered(parts, FILES), rows, with_data=False)
                prefill.order(do="produce", id=f"p.{room}", prompt=prompt, media=media_order(media), **where)
                decode.order(
                    do="consume", id=f"d.{room}", prompt=prompt, media=media_order(places), tokens=TOKENS, **where
                )
                assert (await prefill.answer("id", f"p.{room}"))["problem"] is None
                answers[name] = (await decode.answer("id", f"d.{room}"))["tokens"]
        finally:
            await asyncio.gather(prefill.stop(), decode.stop())
        assert answers == own_answers

    bench.run(body(), 900)
