"""smoldiff over HTTP: it answers as well as in training, and its answers come block by block."""

import asyncio
import json
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import pytest

pytest.importorskip("torch")

from baton.models.directory import resolve_model
from tests.e2e.harness import Serve
from tools.smoldiff.ask import measure
from tools.smoldiff.directory import BLOCK_LENGTH
from tools.smoldiff.problems import ABILITIES, held_out_problems
from tools.smoldiff.wordings import KINDS

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.timeout(600)]

FEW, MANY = 2, 50
AT_ONCE = 8
GREETING = "hello"
PROMPT_TOKENS = len(GREETING) + 3  # one for each byte, and three of the chat


@pytest.fixture(scope="module")
def smoldiff(start_shared: Callable[..., Serve]) -> Iterator[Serve]:
    serve = start_shared(Serve, "smoldiff", "--torch-threads", "1", engine="torch")
    yield serve
    serve.stop()


def accuracy(system: Serve, count: int, **diffusion: object) -> dict[str, float]:
    """Return the share of right answers to `count` problems of each kind."""
    return asyncio.run(measure(system.url, "smoldiff", held_out_problems(count), AT_ONCE, diffusion or None))


def in_training() -> dict[str, float]:
    """Return the accuracy that training was measured with."""
    log = resolve_model("smoldiff", Path()) / "training.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if line.get("final") == "held_out_problems"][-1]


def test_it_answers_problems_that_training_never_had(smoldiff: Serve) -> None:
    assert accuracy(smoldiff, FEW)["all"] >= 1 - 1 / (FEW * len(KINDS))


def test_an_answer_comes_block_by_block(smoldiff: Serve) -> None:
    stream = smoldiff.client().chat.completions.create(
        model="smoldiff", messages=[{"role": "user", "content": GREETING}], stream=True
    )
    texts = [text for event in stream for choice in event.choices if (text := choice.delta.content)]
    assert "".join(texts) == ABILITIES
    *ends, last = accumulate(map(len, texts), initial=PROMPT_TOKENS)
    assert len(texts) > 1
    assert all(end % BLOCK_LENGTH == 0 for end in ends[1:]), "an event ends with a block"
    assert last == PROMPT_TOKENS + len(ABILITIES)


def test_every_way_of_decoding_answers_as_well(smoldiff: Serve) -> None:
    few = held_out_problems(1)
    for options in ({"remasking": "low_confidence_static"}, {"block_length": 4, "threshold": 0.8}):
        assert accuracy(smoldiff, 1, **options)["all"] >= 1 - 1 / len(few), options


@pytest.mark.slow
def test_it_answers_as_well_as_in_training(smoldiff: Serve) -> None:
    found, trained = accuracy(smoldiff, MANY), in_training()
    asked = MANY * len(KINDS)
    deviation = (trained["all"] * (1 - trained["all"]) / asked) ** 0.5
    assert found["all"] == pytest.approx(trained["all"], abs=3 * deviation)
    assert all(found[kind] >= 0.94 for kind in KINDS), found
