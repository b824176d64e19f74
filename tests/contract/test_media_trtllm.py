"""Media in prompts of TensorRT-LLM: files, embeddings and handles, over doubles that tokenise text as the library does.

The double asserts that nothing is preprocessed on an event loop, and counts preprocessed media that are never read.
"""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image
from prometheus_client import CollectorRegistry

from baton.config.engines import TrtllmOptions
from baton.engines.trtllm.adapter import TrtllmEngine
from baton.engines.trtllm.encoder import TrtllmEncoder
from baton.engines.trtllm.llm_args import RequestType
from baton.engines.trtllm.media_prompt import SEPARATOR, prompt_text
from baton.errors import Cancelled, ContextTooLong, EngineFailed, InvalidRequest, Unsupported
from baton.media.images import probe_image
from baton.models.placeholders import read_media_info
from baton.models.tokenizer import HubTokenizer
from baton.ports.engine import EncodeWork, EngineInfo, GenerateEngine, Work
from baton.protocol.handoff import Consume, PrefillResult, Produce
from baton.protocol.ids import new_request_id
from baton.protocol.media import EncodedItem, Media, MediaEmbedding, MediaFile, MediaHandles
from baton.protocol.outputs import Finished, FinishReason, HandoffReady, Output, PromptCached, TokenDelta
from baton.protocol.requests import OutputOptions, Sampling, StopConditions
from baton.testing import eventually, run_bounded, running
from tests.doubles.trtllm import World, make_library
from tests.doubles.vision_chat_model import IMAGE, ROW_SIZE, VIDEO, make_vision_chat_model

NEW = ["1.3.0rc22", "1.3.0rc25"]
CONTEXT = 256
ARGUMENTS = (
    "--max_batch_size=4",
    f"--max_seq_len={CONTEXT}",
    "--kv_cache_config.tokens_per_block=16",
    "--kv_cache_config.max_tokens=8192",
)
TYPED = tuple(b"<|image|>")
PATCHES = 16  # of the probe's 64 by 64 pixels


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_chat_model(tmp_path_factory.mktemp("vision") / "model")


def engine(
    model: Path, world: World, request_type: RequestType | None = None, version: str = NEW[0], **options: Any
) -> TrtllmEngine:
    library = make_library(version, world, CollectorRegistry())
    return TrtllmEngine(TrtllmOptions(poll_ms=20, **options), ARGUMENTS, model, "double", request_type, library)


def image(color: str = "red", width: int = 64, height: int = 64) -> MediaFile:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return MediaFile(modality="image", data=file.getvalue())


def work(tokens: tuple[int, ...], *media: Media, max_tokens: int = 8, handoff: Any = None, **changes: Any) -> Work:
    made = Work(
        request_id=new_request_id("media"),
        token_ids=tokens,
        media=media,
        max_tokens=max_tokens,
        stop=StopConditions(ignore_eos=True),
        sampling=Sampling(temperature=0.0),
        eos_token_ids=(257,),
        handoff=handoff,
    )
    return msgspec.structs.replace(made, **changes)


async def outputs_of(tested: GenerateEngine, request: Work) -> list[Output]:
    stream = tested.submit(request)
    outputs: list[Output] = []
    while read := await stream.read():
        outputs += read
    return outputs


async def tokens_of(tested: GenerateEngine, request: Work) -> list[int]:
    outputs = await outputs_of(tested, request)
    return [token for output in outputs if isinstance(output, TokenDelta) for token in output.token_ids]


def prompt_tokens(outputs: list[Output]) -> int | None:
    [cached] = [output for output in outputs if isinstance(output, PromptCached)]
    return cached.prompt_tokens


# Files


@pytest.mark.parametrize("version", NEW)
def test_images_are_decoded_preprocessed_and_counted(model: Path, version: str) -> None:
    async def body() -> None:
        world = World()
        async with running(tested := engine(model, world, version=version)):
            assert tested.capabilities.modalities == {"text", "image", "video"}
            outputs = await outputs_of(tested, work((5, IMAGE, 7), image()))
            assert prompt_tokens(outputs) == 2 + PATCHES, "the image has a token for each patch"
            red, blue = [await tokens_of(tested, work((5, IMAGE, 7), image(color))) for color in ("red", "blue")]
            assert red != blue, "the image changes the output"
            assert red == [token for each in outputs if isinstance(each, TokenDelta) for token in each.token_ids]
            assert world.prepared == 0

    run_bounded(body())


def test_d25_every_image_of_a_request_is_used_in_order(model: Path) -> None:
    async def body() -> None:
        async with running(tested := engine(model, World())):
            prompt = (IMAGE, 5, IMAGE, 6)
            answers = [
                await tokens_of(tested, work(prompt, image(first), image(second)))
                for first, second in (("red", "blue"), ("blue", "red"), ("red", "red"))
            ]
            assert len({tuple(answer) for answer in answers}) == 3

    run_bounded(body())


def test_images_and_videos_go_to_their_own_placeholders(model: Path) -> None:
    async def body() -> None:
        async with running(tested := engine(model, World())):
            video = MediaFile(modality="video", data=b"frame frame frame")
            outputs = await outputs_of(tested, work((VIDEO, 5, IMAGE), image(), video))
            assert prompt_tokens(outputs) == 1 + PATCHES + 3 * 4
            broken = MediaFile(modality="video", data=b"nothing", place="multi_modal_data.video_url[0]")
            with pytest.raises(InvalidRequest, match=r"multi_modal_data\.video_url\[0\]: cannot read the video"):
                await outputs_of(tested, work((VIDEO,), broken))

    run_bounded(body())


def test_a_broken_file_is_the_clients_fault_and_a_broken_processor_is_not(model: Path) -> None:
    async def body() -> None:
        world = World()
        async with running(tested := engine(model, world)):
            broken = MediaFile(modality="image", data=b"no image", place="here[0]")
            with pytest.raises(InvalidRequest, match=r"here\[0\]: it is not an image"):
                await outputs_of(tested, work((IMAGE,), broken))
            with pytest.raises(InvalidRequest, match=r"has 2 placeholders '<\|image\|>' for 1 items"):
                await outputs_of(tested, work((IMAGE, IMAGE), image()))
            world.processor_broken = True
            with pytest.raises(EngineFailed, match=r"cannot preprocess the media.*processor is broken"):
                await outputs_of(tested, work((IMAGE,), image()))
            world.processor_broken = False
            assert await tokens_of(tested, work((IMAGE,), image())), "later requests are not affected"
            await eventually(lambda: tested.progress().waiting == tested.progress().running == world.prepared == 0)

    run_bounded(body())


def test_the_event_loop_runs_while_an_image_is_preprocessed(model: Path) -> None:
    async def body() -> None:
        world = World()
        async with running(tested := engine(model, world)):
            world.preprocess_gate.clear()
            slow = asyncio.create_task(tokens_of(tested, work((IMAGE,), image())))
            await eventually(lambda: tested.progress().waiting == 1)
            assert await tokens_of(tested, work((1, 2, 3))), "text is answered meanwhile"
            world.preprocess_gate.set()
            assert await slow

    run_bounded(body())


@pytest.mark.parametrize("requests", [1, 20])
def test_d16_media_of_requests_that_are_aborted_while_they_are_preprocessed_are_freed(
    model: Path, requests: int
) -> None:
    async def body() -> None:
        world = World()
        async with running(tested := engine(model, world)):
            world.preprocess_gate.clear()
            works = [work((IMAGE,), image()) for _ in range(requests)]
            streams = [tested.submit(each) for each in works]
            await asyncio.sleep(0)
            aborts = [asyncio.create_task(tested.abort(each.request_id)) for each in works]
            for stream in streams:
                with pytest.raises(Cancelled):
                    await stream.read()
            world.preprocess_gate.set()
            await asyncio.gather(*aborts)
            await eventually(lambda: tested.progress().waiting == 0 and world.prepared == 0)
            assert await tokens_of(tested, work((IMAGE,), image()))

    run_bounded(body())


def test_d24_concurrent_requests_have_nothing_in_common(model: Path) -> None:
    async def body() -> None:
        async with running(tested := engine(model, World())):
            colors = ["red", "green", "blue", "white"]
            alone = [await tokens_of(tested, work((5, IMAGE), image(color))) for color in colors]
            together = await asyncio.gather(
                *(tokens_of(tested, work((5, IMAGE), image(color))) for color in colors * 5)
            )
            assert together == alone * 5

    run_bounded(body())


def test_the_output_is_limited_by_the_context_after_expansion(model: Path) -> None:
    async def body() -> None:
        world = World()
        async with running(tested := engine(model, world)):
            generated = await tokens_of(tested, work((IMAGE,), image(), max_tokens=CONTEXT - 1))
            assert len(generated) == CONTEXT - PATCHES
            with pytest.raises(ContextTooLong, match=f"{CONTEXT} tokens; the prompt with its media has 1024"):
                await outputs_of(tested, work((IMAGE,), image(width=512, height=512)))
            assert world.prepared == 0

    run_bounded(body())


def test_each_choice_that_fills_the_context_after_expansion_ends_by_its_length(model: Path) -> None:
    async def body() -> None:
        async with running(tested := engine(model, World())):
            sampling = Sampling(n=3, temperature=1.0, seed=5)
            outputs = await outputs_of(tested, work((IMAGE,), image(), max_tokens=CONTEXT - 1, sampling=sampling))
            ends = [output for output in outputs if isinstance(output, Finished)]
            assert [end.reason for end in ends] == [FinishReason.LENGTH] * 3

    run_bounded(body())


def test_12_takes_no_files_and_says_so(model: Path) -> None:
    async def body() -> None:
        async with running(tested := engine(model, World(), version="1.2.1")):
            with pytest.raises(Unsupported, match=r"TensorRT-LLM 1\.2\.1 blocks .* use 1\.3, or an encode worker"):
                tested.submit(work((IMAGE,), image()))

    run_bounded(body())


def test_prompt_logprobs_with_files_are_refused(model: Path) -> None:
    async def body() -> None:
        async with running(tested := engine(model, World())):
            with pytest.raises(Unsupported, match="prompt_logprobs"):
                tested.submit(work((IMAGE,), image(), output=OutputOptions(prompt_logprobs=1)))

    run_bounded(body())


# Placeholders that a client has typed


def test_d26_a_typed_placeholder_is_text_to_the_library(model: Path) -> None:
    """The handlers have made text of it; decoded and tokenised again it would be a placeholder."""

    async def body() -> None:
        world = World()
        async with running(tested := engine(model, world)):
            outputs = await outputs_of(tested, work((*TYPED, 5, IMAGE, 7), image()))
            separator = len(SEPARATOR.encode())
            assert prompt_tokens(outputs) == len(TYPED) + separator + 2 + PATCHES
            assert world.preprocessed == ["text"]
            await outputs_of(tested, work((5, IMAGE, 7), image()))
            assert world.preprocessed == ["text", "tokens"], "other prompts stay tokens"

    run_bounded(body())


def test_d26_only_typed_placeholders_are_separated(model: Path) -> None:
    info, tokenizer = read_media_info(model), HubTokenizer(model)
    assert info is not None
    tokens = (*TYPED, IMAGE, *b"a", *TYPED, VIDEO, *b"<|video|>")
    apart = f"<{SEPARATOR}|image|>"
    assert prompt_text(tokenizer, tokens, info.placeholders.values()) == (
        f"{apart}<|image|>a{apart}<|video|><{SEPARATOR}|video|>",
        True,
    )
    assert prompt_text(tokenizer, (IMAGE, *b"a"), info.placeholders.values()) == ("<|image|>a", False)


def test_placeholders_and_rows_of_a_model_directory(model: Path) -> None:
    info = read_media_info(model)
    assert info is not None
    assert (info.shape.size, info.shape.dtype) == (ROW_SIZE, "float32")
    found = info.placeholders["image"]
    assert (found.token, found.text, found.as_text) == (IMAGE, "<|image|>", TYPED)
    assert info.placeholders["video"].token == VIDEO


# Embeddings


def embedding(rows: int, position: int, value: int = 1, **changes: Any) -> MediaEmbedding:
    item = EncodedItem(
        modality="image", content_hash="0" * 32, expansion=((IMAGE, rows),), embed_token=IMAGE, rows=rows
    )
    data = memoryview(bytes([value]) * rows * ROW_SIZE * 4)
    made = MediaEmbedding(item=item, position=position, dtype="float32", size=ROW_SIZE, data=data)
    return msgspec.structs.replace(made, **changes)


def test_embedding_rows_take_the_place_of_their_expansion(model: Path) -> None:
    async def body() -> None:
        world = World()
        async with running(tested := engine(model, world)) as info:
            assert tested.capabilities.media_embeddings
            assert isinstance(info, EngineInfo)
            assert info.media is not None
            prompt = (5, *(IMAGE,) * 3, 6, *(IMAGE,) * 2, 7)
            first, second = embedding(3, 1), embedding(2, 5, value=9)
            outputs = await outputs_of(tested, work(prompt, second, first))
            assert prompt_tokens(outputs) == len(prompt)
            tokens = [token for each in outputs if isinstance(each, TokenDelta) for token in each.token_ids]
            assert tokens == await tokens_of(tested, work(prompt, first, second)), "they are placed by position"
            assert tokens != await tokens_of(tested, work(prompt, embedding(3, 1, value=2), second))
            assert world.prepared == 0

    run_bounded(body())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 8}, "rows of 8 numbers of type float32 do not fit this model, which takes 16 of type float32"),
        ({"dtype": "float16"}, "of type float16 do not fit"),
        ({"data": memoryview(b"short")}, "5 bytes are not 3 rows; those have 192"),
        ({"data": None}, "0 bytes are not 3 rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_the_library_sees_them(
    model: Path, changes: dict[str, Any], message: str
) -> None:
    async def body() -> None:
        world = World()
        async with running(tested := engine(model, world)):
            with pytest.raises(InvalidRequest, match=message):
                tested.submit(work((IMAGE,) * 3, embedding(3, 0, **changes)))
            assert world.preprocessed == []

    run_bounded(body())


def test_an_expansion_that_the_library_does_not_share_is_an_error(model: Path) -> None:
    async def body() -> None:
        world = World()
        async with running(tested := engine(model, world)):
            item = EncodedItem(
                modality="image", content_hash="0", expansion=((5, 1), (IMAGE, 3)), embed_token=IMAGE, rows=3
            )
            with pytest.raises(
                EngineFailed, match="expands the media of the prompt to 3 tokens, and their encoder to 4"
            ):
                await outputs_of(tested, work((5, *(IMAGE,) * 3), embedding(3, 0, item=item)))
            assert world.prepared == 0

    run_bounded(body())


def test_a_model_without_vision_and_autodeploy_take_no_embeddings(model: Path) -> None:
    from baton.engines.echo.engine import MODEL_DIR

    text = engine(MODEL_DIR, World()).capabilities
    assert (text.modalities, text.media_embeddings) == ({"text"}, False)
    auto = engine(model, World(), backend="_autodeploy").capabilities
    assert (auto.modalities, auto.media_embeddings) == ({"text", "image", "video"}, False)


# Prefill and decode


@pytest.mark.parametrize("kind", ["file", "embedding", "handles"])
def test_d27_a_decode_continues_without_media(model: Path, kind: str) -> None:
    async def body() -> None:
        world = World()
        library = make_library(NEW[0], world, CollectorRegistry())
        async with (
            running(whole := engine(model, world)),
            running(prefill := engine(model, world, "context_only")),
            running(decode := engine(model, world, "generation_only")),
            running(encoder := TrtllmEncoder(TrtllmOptions(), (), model, "double", library)),
        ):
            encoded = EncodeWork(request_id=new_request_id("e"), token_ids=(5, IMAGE, 7), media=(image(),))
            prompt: tuple[int, ...] = (5, IMAGE, 7)
            media: Media = image()
            if kind == "embedding":
                prompt, media = (5, *(IMAGE,) * PATCHES, 7), embedding(PATCHES, 1)
            elif kind == "handles":
                media = MediaHandles(params=(await encoder.encode(encoded)).params or {})
            expected = await tokens_of(whole, work(prompt, media))
            outputs = await outputs_of(prefill, work(prompt, media, max_tokens=1, handoff=Produce()))
            [ready] = [each for each in outputs if isinstance(each, HandoffReady)]
            sent = json.loads(json.dumps(ready.params))
            assert len(sent["prompt_token_ids"]) == 2 + PATCHES
            assert "multimodal_embedding_handles" not in sent
            if kind != "embedding":
                assert sent["mrope_position_ids_handle"]
            consume = Consume(source=PrefillResult(disaggregated_params=sent))
            before = len(world.preprocessed)
            got = await outputs_of(decode, work(prompt, media, handoff=consume, max_tokens=CONTEXT))
            tokens = [token for each in got if isinstance(each, TokenDelta) for token in each.token_ids]
            assert tokens[: len(expected)] == expected
            assert len(tokens) == CONTEXT - 2 - PATCHES, "the rest of the context"
            assert prompt_tokens(got) == 2 + PATCHES
            assert isinstance(got[-1], Finished)
            assert len(world.preprocessed) == before, "the decode preprocesses nothing"
            await encoder.abort(encoded.request_id)
            assert world.media_held == 0

    run_bounded(body())


# The encoder


def test_d26_an_encoder_counts_placeholders_by_position(model: Path) -> None:
    async def body() -> None:
        world = World()
        library = make_library(NEW[0], world, CollectorRegistry())
        async with running(tested := TrtllmEncoder(TrtllmOptions(), (), model, "double", library)) as info:
            assert info.media is not None
            typed = EncodeWork(
                request_id=new_request_id("e"), token_ids=(*TYPED, IMAGE, IMAGE), media=(image(), image("blue"))
            )
            encoded = (await tested.encode(typed)).params or {}
            assert len(encoded["multimodal_embedding_handles"]) == 2  # type: ignore[arg-type]
            await tested.abort(typed.request_id)
            too_many = msgspec.structs.replace(typed, token_ids=(IMAGE,) * 3)
            with pytest.raises(InvalidRequest, match=r"has 3 placeholders '<\|image\|>' for 2 items"):
                await tested.encode(too_many)
            assert (world.prepared, world.media_held) == (0, 0)

    run_bounded(body())


@pytest.mark.parametrize("version", ["1.2.1", *NEW])
def test_an_image_processor_that_fails_is_not_the_clients_fault(model: Path, version: str) -> None:
    async def body() -> None:
        world = World()
        library = make_library(version, world, CollectorRegistry())
        async with running(tested := TrtllmEncoder(TrtllmOptions(), (), model, "double", library)):
            good = EncodeWork(request_id=new_request_id("e"), token_ids=(IMAGE,), media=(probe_image(),))
            world.processor_broken = True
            with pytest.raises(EngineFailed, match="processor is broken"):
                await tested.encode(good)
            bad = msgspec.structs.replace(good, media=(MediaFile(modality="image", data=b"x", place="here"),))
            with pytest.raises(InvalidRequest, match="here: it is not an image"):
                await tested.encode(bad)
            world.processor_broken = False
            assert (await tested.encode(good)).params
            await tested.abort(good.request_id)
            assert (world.prepared, world.media_held) == (0, 0)

    run_bounded(body())


def test_d16_an_encode_call_cancelled_while_it_preprocesses_frees_everything(model: Path) -> None:
    async def body() -> None:
        world = World()
        library = make_library(NEW[0], world, CollectorRegistry())
        async with running(tested := TrtllmEncoder(TrtllmOptions(), (), model, "double", library)):
            world.preprocess_gate.clear()
            work = EncodeWork(request_id=new_request_id("e"), token_ids=(IMAGE,), media=(probe_image(),))
            call = asyncio.create_task(tested.encode(work))
            await eventually(lambda: tested.progress().running == 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            world.preprocess_gate.set()
            await eventually(lambda: tested.progress().steps == 1 and world.prepared == 0)
            assert world.media_shared == 0

    run_bounded(body())


def test_concurrent_encode_calls_use_the_librarys_socket_one_at_a_time(model: Path) -> None:
    """The double asserts it."""

    async def body() -> None:
        for version in ("1.2.1", NEW[0]):
            library = make_library(version, World(), CollectorRegistry())
            async with running(tested := TrtllmEncoder(TrtllmOptions(), (), model, "double", library)):
                works = [
                    EncodeWork(request_id=new_request_id("e"), token_ids=(IMAGE,), media=(probe_image(),))
                    for _ in range(16)
                ]
                await asyncio.gather(*(tested.encode(each) for each in works))

    run_bounded(body())


@pytest.mark.parametrize("read", [False, True])
def test_d16_handles_that_nobody_reads_are_freed(model: Path, read: bool) -> None:
    """The memory of a shared tensor is free after it has been read once, and must not be read twice."""

    async def body() -> None:
        world = World()
        library = make_library(NEW[0], world, CollectorRegistry())
        async with running(tested := TrtllmEncoder(TrtllmOptions(), (), model, "double", library)):
            request = EncodeWork(request_id=new_request_id("e"), token_ids=(IMAGE,), media=(probe_image(),))
            params: Any = (await tested.encode(request)).params
            if read:
                world.read(params["multimodal_embedding_handles"][0]["storage_handle"])
            else:
                tested.mark_unread(request.request_id)
            await tested.abort(request.request_id)
            await eventually(lambda: world.media_shared == world.media_held == 0)
            tested.mark_unread(request.request_id)
            await tested.abort(request.request_id)

    run_bounded(body())
