"""A diffusion language model on the built-in engine generates exactly what the plain reference does, in float32."""

import asyncio
import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.config.engines import TorchOptions
from baton.engines.torch.engine import TorchEngine
from baton.ports.engine import Work
from baton.protocol.ids import new_request_id
from baton.protocol.outputs import Finished, FinishReason, TokenDelta
from baton.protocol.requests import DiffusionOptions, OutputOptions, Remasking, Sampling, StopConditions
from baton.testing.bounded import run_bounded
from baton.testing.fakes import running
from tests.doubles.tiny_models import make_tiny_diffusion
from tests.torch.diffusion_reference import Asked, Reference

Model = tuple[Path, Reference]
STATIC, DYNAMIC = Remasking.STATIC, Remasking.DYNAMIC
BACKENDS: dict[str, dict[str, object]] = {"native": {"native": True}, "torch": {"native": False}}
if torch.cuda.is_available():
    BACKENDS["cuda"] = {"device": "cuda"}
BACKENDS = {name: {"device": "cpu", **options} for name, options in BACKENDS.items()}


@pytest.fixture(scope="module", params=["sdar", pytest.param("llada", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return _make(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return _make("sdar", tmp_path_factory)


def _make(layout: str, directories: pytest.TempPathFactory) -> Model:
    fields = {"block_length": 4} if layout == "llada" else {}
    directory = make_tiny_diffusion(directories.mktemp(layout), layout, changes={"num_hidden_layers": 2}, **fields)
    return directory, Reference(directory)


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> dict[str, object]:
    return BACKENDS[request.param]


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return _make("llada", tmp_path_factory)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return _make("sdar_moe", tmp_path_factory)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    numbers = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(0, 256, (length,), generator=numbers).tolist())


def work(asked: Asked, choices: int = 1, priority: int = 0) -> Work:
    return Work(
        request_id=new_request_id("diffusion"),
        token_ids=asked.prompt,
        max_tokens=asked.tokens,
        stop=StopConditions(
            max_tokens=asked.tokens, min_tokens=asked.min_tokens, ignore_eos=True, stop_token_ids=asked.stops
        ),
        sampling=Sampling(
            n=choices,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            min_p=asked.min_p,
            seed=asked.seed,
        ),
        output=OutputOptions(logprobs=2),
        diffusion=DiffusionOptions(
            remasking=asked.remasking,
            block_length=asked.block,
            steps=asked.steps,
            threshold=asked.threshold if asked.remasking is DYNAMIC else None,
        ),
        priority=priority,
    )


class Found:
    """The deltas, the log-probabilities and the end of each choice."""

    def __init__(self, choices: int) -> None:
        self.deltas: list[list[list[int]]] = [[] for _ in range(choices)]
        self.logprobs: list[list[float]] = [[] for _ in range(choices)]
        self.ends: list[Finished | None] = [None] * choices


async def answer(engine: TorchEngine, asked: Work) -> Found:
    stream, found = engine.submit(asked), Found(asked.sampling.n or 1)
    while outputs := await stream.read():
        for output in outputs:
            if isinstance(output, TokenDelta):
                found.deltas[output.index].append(list(output.token_ids))
                assert output.logprobs is not None
                found.logprobs[output.index] += output.logprobs.chosen
            elif isinstance(output, Finished):
                found.ends[output.index] = output
    return found


async def ask_all(directory: Path, works: list[Work], together: bool = True, **options: object) -> list[Found]:
    defaults: dict[str, object] = {"dtype": "float32", "threads": 1, "blocks": 128, "max_running": 16, "context": 1000}
    engine = TorchEngine(TorchOptions(**(defaults | options)), directory, "tiny")
    async with running(engine):
        if together:
            return list(await asyncio.gather(*(answer(engine, asked) for asked in works)))
        return [await answer(engine, asked) for asked in works]


def check(reference: Reference, asked: Asked, found: Found, choices: int = 1) -> None:
    for choice in range(choices):
        expected = reference.answer(asked._replace(choice=choice if asked.temperature else 0))
        assert list(itertools.chain.from_iterable(found.deltas[choice])) == expected.tokens, asked
        # A reader that is slower than the engine gets several blocks in one delta.
        assert set(_ends(found.deltas[choice])) <= set(_ends(expected.blocks)), "a delta has whole blocks"
        assert found.logprobs[choice] == pytest.approx(expected.logprobs, abs=1e-3)
        end = found.ends[choice]
        assert end is not None
        stopped = expected.tokens[-1] in asked.stops and len(expected.tokens) >= asked.min_tokens
        assert end.reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)


def _ends(parts: list[list[int]]) -> list[int]:
    """Return how many tokens there are after each part."""
    return list(itertools.accumulate(map(len, parts)))


def check_all(model: Model, asked: Iterable[Asked], together: bool = True, **options: object) -> list[Found]:
    directory, reference = model
    requests = list(asked)
    found = run_bounded(ask_all(directory, [work(one) for one in requests], together, **options), 100)
    for one, answer in zip(requests, found, strict=True):
        check(reference, one, answer)
    return found


def test_prompts_that_end_anywhere_in_a_block_and_several_block_lengths(
    model: Model, backend: dict[str, object]
) -> None:
    lengths = [Asked(prompt(length)) for length in (1, 3, 4, 5, 16, 33)]
    others = [Asked(prompt(9, block), block=block, threshold=0.5) for block in (1, 2, 8, 16)]
    check_all(model, lengths + others, together=False, **backend)


def test_remasking_steps_and_thresholds(model: Model, backend: dict[str, object]) -> None:
    static = [Asked(prompt(6), block=8, remasking=STATIC, steps=steps) for steps in (1, 2, 3, 5, 8)]
    dynamic = [Asked(prompt(7), block=8, threshold=threshold) for threshold in (0.0, 0.2, 0.5, 1.0)]
    limited = [Asked(prompt(7), block=8, steps=3, threshold=0.6)]
    check_all(model, static + dynamic + limited, **backend)


def test_a_batch_with_chunks_preemption_and_shared_prefixes(model: Model, backend: dict[str, object]) -> None:
    asked = [Asked(prompt(length, 1), threshold=0.5) for length in (5, 40, 61, 18, 70)]
    asked += [Asked((*asked[1].prompt[:32], 7, 8, 9), threshold=0.5), Asked(asked[2].prompt, remasking=STATIC, steps=2)]
    asked += [Asked(asked[1].prompt, block=2), Asked(asked[3].prompt, block=8, remasking=STATIC)]
    # 22 tokens a step cut most prompts into chunks; 16 pages of 8 hold about two of the requests at a time.
    check_all(model, asked, block_size=8, blocks=16, batch_tokens=22, max_running=6, **backend)


def test_sampling_is_reproducible_in_every_batch(sdar: Model, backend: dict[str, object]) -> None:
    directory, reference = sdar
    asked = [
        Asked(prompt(5, 2), temperature=0.8, seed=1),
        Asked(prompt(6, 2), temperature=1.5, seed=2, top_k=5, remasking=STATIC, steps=2),
        Asked(prompt(7, 2), temperature=1.0, seed=3, top_p=0.7, threshold=0.3),
        Asked(prompt(8, 2), temperature=1.0, seed=4, min_p=0.1),
    ]
    works = [work(one, choices=3) for one in asked]
    for found in run_bounded(_alone_and_together(directory, works, backend), 100):
        for one, answers in zip(asked, found, strict=True):
            check(reference, one, answers, choices=3)


async def _alone_and_together(directory: Path, works: list[Work], backend: dict[str, object]) -> list[list[Found]]:
    alone = await ask_all(directory, works, together=False, **backend)
    again = [Work(**{name: getattr(one, name) for name in one.__struct_fields__}) for one in works]
    return [alone, await ask_all(directory, again, block_size=4, blocks=24, max_running=5, batch_tokens=16, **backend)]


def test_cached_prefixes_give_the_same_tokens(model: Model, backend: dict[str, object]) -> None:
    first = Asked(prompt(48, 3), tokens=20)
    continued = Asked(first.prompt + tuple(model[1].answer(first).tokens), tokens=8)
    asked = [first, first, continued, first._replace(block=2), first._replace(block=2), first._replace(tokens=3)]
    found = check_all(model, asked, together=False, block_size=8, **backend)
    cached = [one.ends[0].cached_tokens if one.ends[0] else None for one in found]
    # The block of the last tokens is never computed as final, and blocks of another length have KV of their own.
    assert cached == [0, 48, 64, 0, 48, 48]


def test_stop_tokens_and_limits_inside_a_block(model: Model, backend: dict[str, object]) -> None:
    _, reference = model
    asked = []
    for length in (6, 8):
        whole = reference.answer(Asked(prompt(length, 4), block=8, threshold=0.4)).tokens
        plain = Asked(prompt(length, 4), block=8, threshold=0.4)
        asked += [plain._replace(tokens=tokens) for tokens in (1, 3, 8, 11)]
        for stop in (whole[0], whole[5], whole[-1]):
            asked += [plain._replace(stops=(stop,)), plain._replace(stops=(stop,), min_tokens=7)]
    check_all(model, asked, **backend)
    prefix = reference.answer(asked[1]).tokens
    assert reference.answer(asked[2]).tokens[: len(prefix)] == prefix, "a limit cuts and changes nothing"


def test_a_model_with_the_names_of_llada(llada: Model, backend: dict[str, object]) -> None:
    check_all(llada, [Asked(prompt(9), tokens=8), Asked(prompt(14), tokens=8, block=8, threshold=0.4)], **backend)


def test_a_model_with_experts(sparse: Model, backend: dict[str, object]) -> None:
    asked = [Asked(prompt(length, 5), threshold=0.5) for length in (3, 8, 30)]
    asked += [Asked(prompt(20, 5), block=8, remasking=STATIC, steps=3)]
    check_all(sparse, asked, block_size=8, batch_tokens=24, **backend)


REQUESTS = st.builds(
    Asked,
    prompt=st.builds(prompt, st.integers(1, 45), st.integers(0, 2)),
    tokens=st.integers(1, 14),
    block=st.sampled_from((1, 2, 4, 8)),
    remasking=st.sampled_from((STATIC, DYNAMIC)),
    steps=st.sampled_from((None, 1)),
    threshold=st.sampled_from((0.1, 0.5, 0.95)),
    temperature=st.sampled_from((0.0, 1.0)),
    top_k=st.sampled_from((0, 3)),
    top_p=st.just(1.0),
    min_p=st.just(0.0),
    choice=st.just(0),
    seed=st.integers(0, 3),
    stops=st.sampled_from(((), (7, 8, 9, 200))),
    min_tokens=st.integers(0, 1),
)


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    asked=st.lists(REQUESTS, min_size=1, max_size=6),
    blocks=st.integers(9, 20),
    batch_tokens=st.integers(8, 64),
    native=st.booleans(),
)
def test_any_mix_of_requests_generates_what_each_does_alone(
    sdar: Model, asked: list[Asked], blocks: int, batch_tokens: int, native: bool
) -> None:
    options = {"block_size": 8, "blocks": blocks, "batch_tokens": batch_tokens, "max_running": 4}
    check_all(sdar, asked, device="cpu", native=native, **options)
