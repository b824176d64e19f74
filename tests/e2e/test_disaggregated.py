"""Disaggregated answers are the aggregated ones, token for token, over every way that KV can take."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("torch")

from baton.config.directories import cache_directory
from baton.config.settings import Settings
from baton.errors import ConfigError
from baton.models.demo import DEMOS, prepare_demo
from baton.transfer import nixl
from tests.doubles.tiny_models import make_tiny_model
from tests.e2e.harness import Serve, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MODEL = "tiny"
# Prompts of 3,000 tokens are computed in two dozen chunks, and sent chunk by chunk.
CHUNKED = ("--torch-batch-tokens", "128", "--torch-blocks", "1024")
# A GPU rounds by the shape of a step, and a decode worker computes other shapes: scores differ in their last digits.
ON_GPU = Path("/dev/nvidiactl").exists()
if ON_GPU:
    CHUNKED += ("--torch-dtype", "float32")
TRANSPORTS = ["shm", "tcp", "nixl", "late"]
LONG = "".join(f"{number} bottles of beer on the wall, " for number in range(100))
PROMPTS = {
    "one token": "a",
    "two tokens": "ab",
    "a block": "0123456789abcdef",
    "a block and a token": "0123456789abcdefg",
    "two blocks less one": "0123456789abcdef0123456789abcde",
    "short": "What is the capital of Japan?",
    "a chunk": "x" * 128,
    "chunked": LONG[:1000],
    "long": LONG[:3000],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / MODEL, seed=3))


@pytest.fixture(scope="module")
def whole(start_shared: Callable[..., Serve], model: str) -> Iterator[Serve]:
    """An aggregated worker: what it says is right."""
    serve = start_shared(Serve, "--model", model, *CHUNKED, engine="torch")
    yield serve
    serve.stop()


@pytest.fixture(scope="module", params=TRANSPORTS)
def split(start_shared: Callable[..., Serve], model: str, request: pytest.FixtureRequest) -> Iterator[Serve]:
    """A prefill and a decode worker on the same model, with one way between them; tcp over IPv6."""
    transport = request.param
    if transport == "nixl" and not nixl.available():
        pytest.skip("NIXL is not installed")
    flags = ["--kv-handoff", "late"] if transport == "late" else ["--kv-transports", transport]
    flags += ["--runtime-bind", "::1"] if transport == "tcp" else []
    serve = start_shared(Serve, "--model", model, *CHUNKED, *flags, engine="torch", prefill=1, decode=1)
    yield serve
    assert_only_this_way(serve, "shm" if transport == "late" else transport)
    serve.stop()


def assert_only_this_way(serve: Serve, transport: str) -> None:
    """The KV took the way that it was told to take."""
    sent = {name: serve.metric("baton_transfer_bytes_total", 1, transport=name) for name in ("shm", "tcp", "nixl")}
    assert [name for name, count in sent.items() if count] == [transport]


def handed_off_late(serve: Serve) -> bool:
    """Whether decode is called after prefill, and not with it."""
    return "late" in serve.process.arguments


def complete(serve: Serve, prompt: str, **options: Any) -> Any:
    defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "logprobs": 3}
    return serve.client(strict=False).completions.create(model=MODEL, prompt=prompt, **(defaults | options))


def said(answer: Any) -> list[tuple[str, str, list[str], list[float]]]:
    """Return the text, the end, the tokens and their log-probabilities of every choice."""
    return [
        (choice.text, choice.finish_reason, choice.logprobs.tokens, choice.logprobs.token_logprobs)
        for choice in sorted(answer.choices, key=lambda choice: choice.index)
    ]


def assert_same(given: Any, expected: Any) -> None:
    """Assert that two answers are equal; on a GPU up to the rounding of their numbers."""
    if not ON_GPU:
        assert given == expected
    elif isinstance(expected, dict):
        assert given.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(given[key], value)
    elif isinstance(expected, list | tuple):
        assert len(given) == len(expected)
        for one, other in zip(given, expected, strict=True):
            assert_same(one, other)
    else:
        assert given == (pytest.approx(expected, abs=1e-4) if isinstance(expected, float) else expected)


def test_no_process_listens_for_other_hosts(split: Serve) -> None:
    complete(split, "move some KV")
    split.assert_unexposed()


@pytest.mark.parametrize("split", ["tcp"], indirect=True)
def test_workers_listen_for_each_other_on_ipv6(split: Serve) -> None:
    hosts = [{at.laddr.ip for at in split.worker(number).net_connections("inet6")} for number in range(2)]
    assert all("::1" in each for each in hosts)


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
def test_the_answer_is_the_same(whole: Serve, split: Serve, prompt: str) -> None:
    expected = said(complete(whole, prompt))
    assert_same(said(complete(split, prompt)), expected)
    # Again: now both sides have the prompt's blocks, and hardly anything is sent.
    again = complete(split, prompt)
    assert_same(said(again), expected)
    assert again.usage.prompt_tokens == len(prompt)
    assert again.usage.prompt_tokens_details.cached_tokens == (len(prompt) - 1) // 16 * 16


@pytest.mark.parametrize("prompt", [PROMPTS["one token"], PROMPTS["two blocks less one"], PROMPTS["chunked"]])
def test_the_scores_of_a_prompt_are_the_same(whole: Serve, split: Serve, prompt: str) -> None:
    for options in (
        {"echo": True, "max_tokens": 0},
        {"echo": True, "max_tokens": 4},
        {"extra_body": {"prompt_logprobs": 2}, "max_tokens": 4},
    ):
        expected, given = (complete(serve, prompt, **options).choices[0] for serve in (whole, split))
        assert_same(given.to_dict(), expected.to_dict())


def test_prompts_that_begin_alike_share_what_is_there(whole: Serve, split: Serve) -> None:
    stem = "once upon a time, " * 20
    for ending in ("there was a fox", "there was a river", "", "nobody was there at all, and then"):
        assert_same(said(complete(split, stem + ending)), said(complete(whole, stem + ending)))


def test_a_prefix_that_decode_has_is_not_sent(split: Serve) -> None:
    def sent(prompt: str) -> float:
        before = split.metric("baton_transfer_bytes_total", 1)
        complete(split, prompt)
        return split.metric("baton_transfer_bytes_total", 1) - before

    stem = "the same words as before and before and before; " * 10
    first = sent(stem + "x" * 20)
    assert sent(stem + "y" * 20) < first / 8


def test_a_stream_says_the_same(whole: Serve, split: Serve) -> None:
    expected = complete(whole, LONG[:700]).choices[0].text
    parts = [chunk.choices[0].text for chunk in complete(split, LONG[:700], stream=True) if chunk.choices]
    assert "".join(parts) == expected


def test_choices_and_seeds_are_the_same(whole: Serve, split: Serve) -> None:
    options: dict[str, Any] = {"seed": 5, "temperature": 1.0}
    assert_same(said(complete(split, LONG[:500], **options)), said(complete(whole, LONG[:500], **options)))
    if not handed_off_late(split):
        with pytest.raises(openai.BadRequestError, match="--kv-handoff late"):
            complete(split, LONG[:500], n=3, **options)
        return
    expected = said(complete(whole, LONG[:500], n=3, **options))
    for _ in range(10):
        assert_same(said(complete(split, LONG[:500], n=3, **options)), expected)
    assert len({text for text, *_ in expected}) == 3


def test_penalties_and_stops_are_the_same(whole: Serve, split: Serve) -> None:
    for options in (
        {"presence_penalty": 1.5, "frequency_penalty": 1.0},
        {"max_tokens": 1},
        {"max_tokens": 200, "extra_body": {"min_tokens": 100}},
    ):
        given, expected = (complete(serve, "count: 1 2 3 4 5", **options) for serve in (split, whole))
        assert_same(said(given), said(expected))


def test_a_guide_is_kept(split: Serve) -> None:
    answer = complete(split, "yes or no?", temperature=1.0, logprobs=None, extra_body={"guided_choice": ["yes", "no"]})
    assert answer.choices[0].text in ("yes", "no")


def test_prompt_logprobs_are_computed_by_decode(split: Serve, whole: Serve) -> None:
    """They cannot be received: the decode worker lets the prefill go and computes the prompt itself."""
    cancelled = split.metric("baton_rooms_ended_total", 0, outcome="cancelled")
    answer = complete(split, LONG[:300], extra_body={"prompt_logprobs": 1})
    assert_same(said(answer), said(complete(split, LONG[:300])))
    assert split.metric("baton_rooms_ended_total", 0, outcome="cancelled") == cancelled + 1
    body = {"model": MODEL, "prompt": LONG[:300], "max_tokens": 0, "echo": True, "logprobs": 1}
    scores, expected = (json.loads(serve.post("/v1/completions", body)[1])["choices"] for serve in (split, whole))
    assert scores[0]["logprobs"]["token_logprobs"][1:] == pytest.approx(
        expected[0]["logprobs"]["token_logprobs"][1:], abs=1e-3
    )
    assert scores[0]["logprobs"]["tokens"] == expected[0]["logprobs"]["tokens"]
    split.assert_quiet()


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": "x" * 5000}, 400, "context"),
        ({"prompt": "x", "max_tokens": 100_000}, 400, "max_tokens"),
        ({"prompt": "x", "logprobs": 500}, 400, ""),
        ({"prompt": []}, 400, ""),
    ],
)
def test_bad_input_is_refused_with_the_reason(split: Serve, body: dict[str, Any], status: int, words: str) -> None:
    got, text = split.post("/v1/completions", {"model": MODEL, "max_tokens": 4, **body})
    assert got == status, text
    assert words in text
    split.assert_quiet()


def test_nothing_is_left_when_it_is_over(split: Serve) -> None:
    split.assert_quiet()
    eventually(lambda: split.metric("baton_rooms_open", 0) == 0, what="no room is open")
    assert split.metric("baton_rooms_ended_total", 0, outcome="expired") == 0
    assert split.metric("baton_rooms_ended_total", 0, outcome="failed") == 0


@pytest.mark.slow
def test_a_real_model_says_the_same(start: Callable[..., Serve]) -> None:
    try:
        prepare_demo(DEMOS["smollm2"], cache_directory(Settings()) / "models")
    except ConfigError as error:
        pytest.skip(error.message)
    alone = start(Serve, engine="torch")
    both = start(Serve, engine="torch", prefill=1, decode=1)
    questions = ["What is the capital of Japan?", "Tell me of a fox and a river. " * 40]
    for question in questions:
        answers = [
            serve.client().chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": question}],
                temperature=0.0,
                max_tokens=48,
                logprobs=True,
                top_logprobs=2,
            )
            for serve in (alone, both, both)
        ]
        texts = {answer.choices[0].message.content for answer in answers}
        assert len(texts) == 1
        assert len({str(answer.choices[0].logprobs) for answer in answers}) == 1
        assert question != questions[0] or "Tokyo" in texts.pop()
