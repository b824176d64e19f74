"""The built-in engine through its port: sampling, choices, guided decoding, bad input."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.config.engines import TorchOptions
from baton.engines.torch.engine import TorchEngine
from baton.errors import Cancelled, ConfigError, EngineFailed, InvalidRequest
from baton.ports.engine import Work
from baton.protocol.commands import Pause
from baton.protocol.events import KvStored, LoadSnapshot
from baton.protocol.ids import new_request_id
from baton.protocol.outputs import Finished, FinishReason, TokenDelta
from baton.protocol.requests import GuidedDecoding, Sampling, StopConditions
from baton.testing.bounded import eventually, run_bounded
from baton.testing.engine_session import read_to_the_end
from baton.testing.fakes import running
from tests.doubles.tiny_models import make_tiny_model

PROMPT = tuple(b"The quick brown fox jumps over the lazy dog, and then")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def started(directory: Path, **options: object) -> AsyncIterator[TorchEngine]:
    defaults: dict[str, object] = {"dtype": "float32", "threads": 1, "blocks": 512, "max_running": 8}
    engine = TorchEngine(TorchOptions(**(defaults | options)), directory, "tiny")
    async with running(engine):
        yield engine


def run(body: Callable[[], Coroutine[None, None, None]]) -> None:
    run_bounded(body(), 60)


def work(
    tokens: int = 12, prompt: tuple[int, ...] = PROMPT, stop: StopConditions | None = None, **sampling: object
) -> Work:
    return Work(
        request_id=new_request_id("test"),
        token_ids=prompt,
        max_tokens=tokens,
        stop=stop or StopConditions(ignore_eos=True),
        sampling=msgspec.convert({"temperature": 0.0} | sampling, Sampling),
        eos_token_ids=(256,),
    )


async def answer(engine: TorchEngine, request: Work) -> tuple[list[list[int]], list[Finished]]:
    stream = engine.submit(request)
    tokens: list[list[int]] = [[] for _ in range(request.sampling.n or 1)]
    ends: list[Finished] = []
    while outputs := await stream.read():
        for output in outputs:
            if isinstance(output, TokenDelta):
                tokens[output.index] += output.token_ids
            elif isinstance(output, Finished):
                ends.append(output)
    return tokens, ends


async def generate(engine: TorchEngine, request: Work) -> list[int]:
    tokens, _ = await answer(engine, request)
    return tokens[0]


# Sampling and stopping


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch(directory: Path) -> None:
    async def body() -> None:
        async with started(directory, batch_tokens=24) as engine:
            seeded = [work(temperature=0.9, seed=seed, top_p=0.95) for seed in range(4)]
            alone = [await generate(engine, asked) for asked in seeded]
            again = [msgspec.structs.replace(asked, request_id=new_request_id("again")) for asked in seeded]
            company = [work(20, PROMPT[: 5 + n], temperature=1.0) for n in range(6)]
            together = await asyncio.gather(*(generate(engine, asked) for asked in (*again, *company)))
            assert list(together[:4]) == alone
            assert len({tuple(tokens) for tokens in alone}) > 1

    run(body)


def test_choices_differ_share_the_prompt_and_end_once_each(directory: Path) -> None:
    async def body() -> None:
        async with started(directory, block_size=4) as engine:
            tokens, ends = await answer(engine, work(10, n=5, temperature=1.5, seed=1))
            assert [len(choice) for choice in tokens] == [10] * 5
            assert len({tuple(choice) for choice in tokens}) > 1
            assert sorted(end.index for end in ends) == [0, 1, 2, 3, 4]
            assert {end.cached_tokens for end in ends} == {0}
            again, _ = await answer(engine, work(10, n=5, temperature=1.5, seed=1))
            assert again == tokens

    run(body)


def test_penalties_and_bias_change_the_tokens(directory: Path) -> None:
    async def body() -> None:
        async with started(directory) as engine:
            plain = await generate(engine, work())
            biased = await generate(engine, work(logit_bias={"77": 100.0}))
            assert biased == [77] * 12
            banned = await generate(engine, work(logit_bias={str(plain[0]): -100.0}))
            assert plain[0] not in banned
            fresh = await generate(
                engine, work(40, logit_bias={"77": 20.0}, presence_penalty=2.0, frequency_penalty=2.0)
            )
            assert fresh.count(77) < 40

    run(body)


def test_eos_stop_tokens_and_min_tokens(directory: Path) -> None:
    async def body() -> None:
        async with started(directory) as engine:
            plain = await generate(engine, work())
            stop = plain[5]
            first = plain.index(stop)
            for field in ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden"):
                conditions = msgspec.convert({field: [stop], "ignore_eos": True}, StopConditions)
                tokens, ends = await answer(engine, work(stop=conditions))
                assert tokens[0] == plain[: first + 1]
                assert (ends[0].reason, ends[0].stop_reason) == (FinishReason.STOP, stop)
            eos = {"logit_bias": {"256": 100.0}}
            tokens, ends = await answer(engine, work(stop=StopConditions(), **eos))
            assert (tokens[0], ends[0].reason) == ([256], FinishReason.EOS)
            tokens, ends = await answer(engine, work(stop=StopConditions(min_tokens=4), **eos))
            assert len(tokens[0]) == 5
            assert 256 not in tokens[0][:4]
            tokens, ends = await answer(engine, work(stop=StopConditions(ignore_eos=True), **eos))
            assert (tokens[0], ends[0].reason) == ([256] * 12, FinishReason.LENGTH)

    run(body)


def test_guided_and_unguided_requests_share_a_batch(directory: Path) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    guides = {
        "json": GuidedDecoding(json=schema),
        "regex": GuidedDecoding(regex="[ab]{3}-[0-9]{2}"),
        "choice": GuidedDecoding(choice=("yes", "no")),
    }

    async def body() -> None:
        async with started(directory) as engine:
            free = await generate(engine, work(30))
            asked = [
                work(100, guided_decoding=msgspec.to_builtins(guided), stop=StopConditions(), temperature=1.0, seed=3)
                for guided in guides.values()
            ]
            answers = await asyncio.gather(*(answer(engine, one) for one in asked), generate(engine, work(30)))
            alphabet = alphabet_of(directory)
            texts = ["".join(alphabet[token] for token in found[0][0] if token < 256) for found in answers[:3]]
            assert isinstance(json.loads(texts[0])["age"], int)
            assert re.fullmatch("[ab]{3}-[0-9]{2}", texts[1])
            assert texts[2] in ("yes", "no")
            assert answers[3] == free

    run(body)


def alphabet_of(directory: Path) -> dict[int, str]:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    return {token: tokenizer.decode([token]) for token in range(256)}


def test_an_invalid_grammar_fails_its_own_request_only(directory: Path) -> None:
    async def body() -> None:
        async with started(directory) as engine:
            bad = engine.submit(work(guided_decoding={"regex": "(unclosed"}))
            good = await generate(engine, work())
            with pytest.raises(InvalidRequest, match="regex"):
                await bad.read()
            assert len(good) == 12
            assert engine.progress().waiting == engine.progress().running == 0

    run(body)


def test_a_request_that_waits_for_its_grammar_can_be_aborted(directory: Path) -> None:
    async def body() -> None:
        async with started(directory) as engine:
            asked = work(guided_decoding={"json": {"type": "array", "items": {"type": "string"}}})
            stream = engine.submit(asked)
            await engine.abort(asked.request_id)
            with pytest.raises(Cancelled):
                await read_to_the_end(stream)
            assert len(await generate(engine, work())) == 12
            assert engine.progress().waiting == engine.progress().running == 0

    run(body)


def test_a_cancelled_abort_still_ends_its_request(directory: Path) -> None:
    async def body() -> None:
        async with started(directory) as engine:
            asked = work(500, PROMPT * 60)
            stream = engine.submit(asked)
            aborting = asyncio.create_task(engine.abort(asked.request_id))
            await asyncio.sleep(0)
            aborting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await aborting
            with pytest.raises(Cancelled):
                await read_to_the_end(stream)
            assert len(await generate(engine, work())) == 12
            assert engine.progress().waiting == engine.progress().running == 0

    run(body)


def test_an_abort_ends_the_choices_that_go_on_after_another_has_ended(directory: Path) -> None:
    """The stream of a client that has left fails before its request is aborted; a choice may end between the two."""

    async def body() -> None:
        async with started(directory) as engine:
            (short, long), _ = await answer(engine, work(400, n=2, temperature=1.5, seed=1))
            stop = next(index for index, token in enumerate(short) if token not in long)
            conditions = StopConditions(ignore_eos=True, stop_token_ids=[short[stop]])
            asked = work(400, n=2, temperature=1.5, seed=1, stop=conditions)
            steps = engine.progress().steps
            engine.submit(asked).fail(Cancelled("the client has left"))
            await eventually(lambda: engine.progress().steps > steps + stop + 1)
            await engine.execute(Pause(mode="keep"))
            await engine.abort(asked.request_id)
            await engine.execute(Pause(mode="keep"))  # what the abort has changed is reported before it returns
            load = await anext(reading async for reading in engine.readings() if isinstance(reading, LoadSnapshot))
            assert (load.running, load.used_blocks) == (0, 0)

    run(body)


# Bad input


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"token_ids": (1,) * 9000}, "KV blocks"),
        ({"max_tokens": 9000}, "KV blocks"),
        ({"sampling": Sampling(logit_bias={"900": 1.0})}, "logit_bias"),
        ({"sampling": Sampling(use_beam_search=True)}, "beam"),
    ],
)
def test_impossible_requests_are_refused_at_submit(directory: Path, change: dict[str, object], complaint: str) -> None:
    async def body() -> None:
        async with started(directory) as engine:
            with pytest.raises(InvalidRequest, match=complaint):
                engine.submit(msgspec.structs.replace(work(), **change))
            assert engine.progress().waiting == 0
            assert len(await generate(engine, work())) == 12

    run(body)


def test_a_request_that_needs_more_blocks_than_exist_is_refused(directory: Path) -> None:
    async def body() -> None:
        async with started(directory, blocks=4) as engine:
            with pytest.raises(InvalidRequest):
                engine.submit(work(40))
            assert len(await generate(engine, work(8))) == 8

    run(body)


def test_logits_with_nan_fail_their_own_request_only(directory: Path, tmp_path: Path) -> None:
    poisoned = make_tiny_model(tmp_path)
    weights = load_file(poisoned / "model.safetensors")
    weights["model.embed_tokens.weight"][250] = torch.nan
    save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})

    async def body(native: bool) -> None:
        async with started(poisoned, native=native, max_running=4) as engine:
            expected = await generate(engine, work(30))
            poisoned_streams = [engine.submit(work(30, (*PROMPT[:n], 250, 7))) for n in (3, 20)]
            assert await asyncio.gather(*(generate(engine, work(30)) for _ in range(3))) == [expected] * 3
            for stream in poisoned_streams:
                with pytest.raises(EngineFailed):
                    await read_to_the_end(stream)
            assert await generate(engine, work(30)) == expected

    for native in (True, False):
        run_bounded(body(native), 60)


@pytest.mark.parametrize(
    ("given", "running", "tokens"), [({}, 64, 256), ({"max_running": 8, "batch_tokens": 100}, 8, 100)]
)
def test_a_router_is_told_the_capacity_that_is_used(
    given: dict[str, int], running: int, tokens: int, directory: Path
) -> None:
    async def body() -> None:
        engine = TorchEngine(TorchOptions(device="cpu", dtype="float32", threads=1, blocks=64, **given), directory, "m")
        try:
            info = await engine.start()
        finally:
            await engine.stop()
        assert (info.max_running, info.max_batch_tokens) == (running, tokens)

    run(body)


@pytest.mark.parametrize("damage", ["cut", "missing", "garbage", "shape", "extra", "lost"])
def test_damaged_weights_are_refused_at_start(damage: str, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path)
    path = directory / "model.safetensors"
    weights = load_file(path)
    match damage:
        case "cut":
            path.write_bytes(path.read_bytes()[:-100])
        case "missing":
            path.unlink()
        case "garbage":
            path.write_bytes(b"not a tensor in sight" * 100)
        case "shape":
            weights["model.norm.weight"] = torch.ones(7)
            save_file(weights, path)
        case "extra":
            weights["model.layers.99.input_layernorm.weight"] = torch.ones(48)
            save_file(weights, path)
        case "lost":
            del weights["model.layers.1.mlp.up_proj.weight"]
            save_file(weights, path)

    async def body() -> None:
        engine = TorchEngine(TorchOptions(dtype="float32", threads=1, blocks=16), directory, "damaged")
        with pytest.raises(ConfigError, match=r"weights|safetensors"):
            await engine.start()
        await engine.stop()

    run(body)


def test_sharded_weights_load(directory: Path, tmp_path: Path) -> None:
    sharded = make_tiny_model(tmp_path)
    weights = load_file(sharded / "model.safetensors")
    names = sorted(weights)
    index = {}
    for number in range(3):
        file = f"model-{number}.safetensors"
        save_file({name: weights[name] for name in names[number::3]}, sharded / file)
        index |= dict.fromkeys(names[number::3], file)
    (sharded / "model.safetensors").unlink()
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    async def body() -> None:
        async with started(directory) as whole, started(sharded) as engine:
            assert await generate(engine, work()) == await generate(whole, work())

    run(body)


# Readings


def test_kv_events_have_content_hashes_and_parents(directory: Path) -> None:
    async def body() -> None:
        async with started(directory, block_size=8) as engine:
            stored: list[KvStored] = []

            async def watch() -> None:
                async for reading in engine.readings():
                    if isinstance(reading, KvStored):
                        stored.append(reading)

            watching = asyncio.create_task(watch())
            tokens = await generate(engine, work(20))
            await eventually(lambda: sum(len(event.block_hashes) for event in stored) == (len(PROMPT) + 19) // 8)
            watching.cancel()
            published = [token for event in stored for token in event.token_ids]
            assert published == [*PROMPT, *tokens][: len(published)]
            names = [name for event in stored for name in event.block_hashes]
            assert next(event.parent_hash for event in stored) is None
            assert [event.parent_hash for event in stored[1:]] == [
                names[names.index(event.block_hashes[0]) - 1] for event in stored[1:]
            ]

    run(body)
