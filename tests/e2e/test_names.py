"""A model with several names: each is listed and answers, and all have one prefix cache."""

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.harness import Serve, eventually

pytestmark = pytest.mark.e2e

NAMES = ("small", "gpt-4o-mini", "org/model")
FLAGS = ("--served-name", "small, gpt-4o-mini", "--served-model-name", "org/model")
PREFIX = "every name has the same prefix cache; " * 12
PROMPTS = 8  # each of which may be on either worker


@pytest.fixture(scope="module")
def named(start_shared: Callable[..., Serve]) -> Iterator[Serve]:
    serve = start_shared(Serve, *FLAGS, "--router", "kv", "--max-model-len", "2048", workers=2)
    yield serve
    serve.stop()


def ask(serve: Serve, name: str, prompt: str = "Hello") -> int:
    """Check the answer to a request for `name`; return how many tokens of the prompt were cached."""
    answer = serve.client().completions.create(model=name, prompt=prompt, max_tokens=3)
    assert (answer.model, answer.choices[0].text) == (name, prompt[:3])
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return (details.cached_tokens or 0) if details is not None else 0


def test_every_name_is_listed_and_answers(named: Serve) -> None:
    assert {model.id for model in named.client().models.list()} == set(NAMES)
    assert "Serving small (also as gpt-4o-mini, org/model) on " in named.process.output.read_text()
    for name in NAMES:
        ask(named, name)
    assert named.post("/v1/completions", {"model": "other", "prompt": "Hello", "max_tokens": 3})[0] == 404


def test_logs_and_metrics_have_the_name_that_was_asked_for(named: Serve) -> None:
    ask(named, "org/model", "seven!!")
    eventually(
        lambda: any("prompt=7 " in line and " model=org/model " in line for line in request_lines(named)),
        what="the name in a worker's log",
    )
    assert 'model="org/model"' in named.get("/metrics")[1]


def request_lines(serve: Serve) -> list[str]:
    return [line for worker in ("worker-0", "worker-1") for line in serve.log_of(worker).splitlines()]


def test_a_prefix_that_was_computed_under_one_name_is_found_under_the_others(named: Serve) -> None:
    prompts = [f"{number} {PREFIX}" for number in range(PROMPTS)]
    for prompt in prompts:
        ask(named, "small", prompt)
    for name in NAMES:
        last = prompts[-1] + name
        eventually(lambda last=last, name=name: ask(named, name, last) >= 400, what=f"events have reached {name}")
        assert all(ask(named, name, prompt + name) >= 400 for prompt in prompts[:-1])


def test_the_context_length_is_that_of_the_alias(named: Serve) -> None:
    status, text = named.post("/v1/completions", {"model": "small", "prompt": "Hello", "max_tokens": 2048})
    assert (status, "2048" in text) == (400, True), text


def test_a_frontend_that_starts_again_knows_every_name_and_what_the_workers_hold(named: Serve) -> None:
    prompt = "a frontend forgets, its workers do not; " * 12
    ask(named, "small", prompt)
    gone = named.frontend()
    gone.kill()
    gone.wait(10)
    eventually(lambda: all(f'"{name}"' in named.get("/v1/models")[1] for name in NAMES), 30, "every name is listed")
    for name in NAMES:
        eventually(lambda name=name: ask(named, name, prompt + name) >= 400, 30, f"the prefix is found by {name}")
