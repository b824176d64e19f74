"""A mixture-of-experts model over HTTP: split into prefill and decode, and copies on ranks, its text is the same."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.doubles.tiny_models import make_tiny_model
from tests.e2e.harness import Serve

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "tiny"
PROMPTS = ("a", "0123456789abcdefg", "What is the capital of Japan?", "bottles of beer on the wall, " * 30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / MODEL, "qwen2_moe", seed=3))


def texts(serve: Serve) -> list[Any]:
    """Return what the model says, with the probabilities of its tokens."""
    answers = []
    for prompt in PROMPTS:
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "logprobs": 3}
        answer = serve.client(strict=False).completions.create(model=MODEL, prompt=prompt, **options).choices[0]
        answers.append((answer.text, answer.logprobs.token_logprobs))
    return answers


def test_a_model_with_experts_says_the_same_however_it_is_split(start_shared: Callable[..., Serve], model: str) -> None:
    """On a CPU every sum has one order, so even the probabilities are equal."""
    whole = start_shared(Serve, "--model", model, engine="torch")
    expected = texts(whole)
    whole.stop()
    ranks = ("--experts-ranks", "3", "--experts-redundant", "4")
    split = start_shared(Serve, "--model", model, *ranks, engine="torch", prefill=1, decode=1)
    assert texts(split) == expected
    assert split.metric("baton_transfer_bytes_total", 1) > 0
    split.stop()
