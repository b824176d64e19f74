"""Prompts with embedding rows generate exactly what a plain transformers forward on the pictures does: greedy, fp32."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config.engines import TorchOptions
from baton.engines.torch.engine import TorchEngine
from baton.ports.engine import Work
from baton.protocol.outputs import Finished, TokenDelta
from baton.testing.bounded import run_bounded
from baton.testing.fakes import running
from tests.torch.vision_reference import Idefics3Reference, Picture, Prompt, QwenReference, words
from tests.vision_models import make_tiny_idefics3, make_tiny_qwen25vl

BACKENDS: dict[str, dict[str, object]] = {
    "native": {"device": "cpu", "native": True},
    "torch": {"device": "cpu", "native": False},
}
if torch.cuda.is_available():
    BACKENDS["cuda"] = {"device": "cuda"}
CHUNKS: dict[str, object] = {"block_size": 4, "blocks": 60, "batch_tokens": 11, "max_running": 8}


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> dict[str, object]:
    return BACKENDS[request.param]


@pytest.fixture(scope="module")
def idefics3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Idefics3Reference]:
    directory = make_tiny_idefics3(tmp_path_factory.mktemp("idefics3"))
    return directory, Idefics3Reference(directory)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, QwenReference]:
    directory = make_tiny_qwen25vl(tmp_path_factory.mktemp("qwen"))
    return directory, QwenReference(directory)


async def answer(engine: TorchEngine, work: Work) -> tuple[list[int], int]:
    """Return the tokens that are generated, and how many of the prompt were cached."""
    stream, tokens, cached = engine.submit(work), [], -1
    while outputs := await stream.read():
        for output in outputs:
            if isinstance(output, TokenDelta):
                tokens += output.token_ids
            elif isinstance(output, Finished):
                cached = output.cached_tokens or 0
    return tokens, cached


async def ask(directory: Path, works: list[Work], together: bool = True, **options: Any) -> list[tuple[list[int], int]]:
    defaults: dict[str, Any] = {"dtype": "float32", "threads": 1, "blocks": 256, "max_running": 16}
    engine = TorchEngine(TorchOptions(**(defaults | options)), directory, "tiny")
    async with running(engine):
        if together:
            return list(await asyncio.gather(*(answer(engine, work) for work in works)))
        return [await answer(engine, work) for work in works]


def generated(directory: Path, prompts: list[Prompt], **options: Any) -> list[list[int]]:
    return [tokens for tokens, _ in run_bounded(ask(directory, [p.work() for p in prompts], **options), 100)]


def idefics3_prompts(reference: Idefics3Reference) -> list[Prompt]:
    one, two = Picture(1), Picture(2)
    return [
        reference.prompt(words(7), one, words(9, 1)),
        reference.prompt(one, words(3, 2), two, one, words(12, 3)),
        reference.prompt(words(30, 4), two, words(1, 5)),
        reference.prompt(words(7), two, words(9, 1)),
    ]


def qwen_prompts(reference: QwenReference) -> list[Prompt]:
    wide, tall = Picture(1, (1, 4, 8)), Picture(2, (1, 10, 4))
    video = Picture(3, (3, 6, 4), 0.5)
    return [
        reference.prompt(words(7), wide, words(9, 1)),
        reference.prompt(words(2), tall, words(5, 2), wide, words(1, 7), tall, words(12, 3)),
        reference.prompt(words(30, 4), video, words(11, 5)),
        reference.prompt(words(3), wide, words(3, 1), video, words(4, 2), tall, words(6, 3)),
        reference.prompt(words(7), Picture(9, (1, 4, 8)), words(9, 1)),
    ]


def test_idefics3_with_one_and_several_images(
    idefics3: tuple[Path, Idefics3Reference], backend: dict[str, object]
) -> None:
    directory, reference = idefics3
    prompts = idefics3_prompts(reference)
    assert generated(directory, prompts, **backend) == [reference.tokens(prompt) for prompt in prompts]


def test_idefics3_in_chunks_with_preemption(
    idefics3: tuple[Path, Idefics3Reference], backend: dict[str, object]
) -> None:
    directory, reference = idefics3
    prompts = idefics3_prompts(reference)
    assert generated(directory, prompts, **CHUNKS, **backend) == [reference.tokens(prompt) for prompt in prompts]


def test_qwen_with_images_and_video(qwen: tuple[Path, QwenReference], backend: dict[str, object]) -> None:
    directory, reference = qwen
    prompts = qwen_prompts(reference)
    assert generated(directory, prompts, **backend) == [reference.tokens(prompt) for prompt in prompts]


def test_qwen_in_chunks_with_preemption(qwen: tuple[Path, QwenReference], backend: dict[str, object]) -> None:
    directory, reference = qwen
    prompts = qwen_prompts(reference)
    assert generated(directory, prompts, **CHUNKS, **backend) == [reference.tokens(prompt) for prompt in prompts]


def rule_of_qwen(prompt: Prompt) -> torch.Tensor:
    """The positions that Qwen2.5-VL is trained with: after an item, all three continue after the largest before it.

    The transformers that is installed lets text after a video continue after its height and width instead, whatever
    its duration. Both are equal while the positions in time do not exceed those in space.
    """
    parts: list[torch.Tensor] = []
    done = 0

    def text(until: int) -> torch.Tensor:
        first = int(parts[-1].max()) + 1 if parts else 0
        return torch.arange(first, first + until - done).expand(3, -1)

    for placed in prompt.media:
        parts.append(text(placed.position))
        ((frames, height, width),) = placed.item.grid
        step = 2 * (placed.item.seconds_per_grid or 0)
        times = (torch.arange(frames) * step).long()
        grid = torch.meshgrid(times, torch.arange(height // 2), torch.arange(width // 2), indexing="ij")
        parts.append(torch.stack(grid).reshape(3, -1) + int(parts[-1].max()) + 1)
        done = placed.position + placed.item.prompt_tokens
    parts.append(text(len(prompt.token_ids)))
    return torch.cat(parts, dim=1)


def test_text_continues_after_the_end_of_a_long_video(
    qwen: tuple[Path, QwenReference], backend: dict[str, object]
) -> None:
    directory, reference = qwen
    prompt = reference.prompt(words(4), Picture(1, (5, 4, 4), 1.7), words(6), Picture(2, (1, 4, 8)), words(9, 1))
    short = qwen_prompts(reference)[3]
    assert torch.equal(rule_of_qwen(short), reference.positions(short))
    expected = [reference.tokens(prompt, rule_of_qwen(prompt))]
    assert generated(directory, [prompt], **backend) == expected
    assert generated(directory, [prompt], **CHUNKS, **backend) == expected


@pytest.mark.parametrize("batch_tokens", [1, 11])
def test_a_prompt_may_end_with_a_row_of_its_own_step(
    qwen: tuple[Path, QwenReference], backend: dict[str, object], batch_tokens: int
) -> None:
    directory, reference = qwen
    prompt = reference.prompt(words(4), Picture(1, (1, 4, 8)))
    assert len(prompt.token_ids) == 12
    options = {"batch_tokens": batch_tokens, "max_running": 1}
    assert generated(directory, [prompt], **options, **backend) == [reference.tokens(prompt)]
