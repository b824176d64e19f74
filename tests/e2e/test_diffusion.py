"""A diffusion language model over HTTP: text comes block by block, with the options of each request."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.tiny_models import make_tiny_diffusion
from tests.e2e.harness import BATON, Serve, environment, error_in, eventually

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from baton.protocol.requests import Remasking  # noqa: E402
from tests.torch.diffusion_reference import Asked, Reference  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PROMPT = list(b"The quick brown fox jumps over it")
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8},
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 8},
    RESPONSES: {"input": "Hi", "max_output_tokens": 16},
}
Json = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_diffusion(tmp_path_factory.mktemp("models") / "tiny", seed=3, block_size=8)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def serve(start_shared: Callable[..., Serve], model: Path) -> Iterator[Serve]:
    flags = ("--torch-dtype", "float32", "--torch-threads", "1", "--torch-block-size", "8")
    serve = start_shared(Serve, "--model", str(model), *flags, engine="torch")
    yield serve
    serve.stop()


def ask(serve: Serve, path: str = COMPLETIONS, **body: Any) -> Json:
    status, text = serve.post(path, {"model": "tiny", "temperature": 0, **GOOD[path], **body})
    assert status == 200, text
    answer: Json = json.loads(text)
    return answer


def tokens_of(answer: Json, choice: int = 0) -> list[int]:
    tokens: list[int] = answer["choices"][choice]["token_ids"]
    return tokens


def test_tokens_usage_and_options_are_those_of_the_reference(serve: Serve, reference: Reference) -> None:
    plain = Asked(tuple(PROMPT), tokens=20, block=8)
    cases = {
        "{}": plain,
        '{"remasking": "low_confidence_static", "steps": 2}': plain._replace(remasking=Remasking.STATIC, steps=2),
        '{"block_length": 4, "threshold": 0.2}': plain._replace(block=4, threshold=0.2),
    }
    for options, asked in cases.items():
        answer = ask(serve, max_tokens=20, ignore_eos=True, return_token_ids=True, diffusion=json.loads(options))
        assert tokens_of(answer) == reference.answer(asked).tokens, options
        assert answer["usage"]["completion_tokens"] == 20
        assert answer["choices"][0]["finish_reason"] == "length"
    again = ask(serve, max_tokens=20, ignore_eos=True, return_token_ids=True)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    assert tokens_of(again) == reference.answer(plain).tokens


def test_a_stream_has_one_event_for_each_block(serve: Serve) -> None:
    body = {"model": "tiny", "temperature": 0, "prompt": PROMPT, "max_tokens": 20, "stream": True, "logprobs": 0}
    status, text = serve.post(COMPLETIONS, {**body, "ignore_eos": True, "stream_options": {"include_usage": True}})
    assert status == 200
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    counts = [len(event["choices"][0]["logprobs"]["tokens"]) for event in events if _has_tokens(event)]
    assert sum(counts) == 20
    # The prompt has 33 tokens: seven are left of its block. A slow reader gets several blocks at once.
    ends = [7, 15, 20]
    assert all(sum(counts[: number + 1]) in ends for number in range(len(counts)))
    assert events[-1]["usage"]["completion_tokens"] == 20


def _has_tokens(event: Json) -> bool:
    return bool(event["choices"]) and event["choices"][0].get("logprobs") is not None


def test_choices_and_seeds(serve: Serve) -> None:
    options: Json = {"n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 12, "logprobs": 0, "ignore_eos": True}
    first, second = (ask(serve, **options) for _ in range(2))
    texts = [choice["logprobs"]["tokens"] for choice in first["choices"]]
    assert texts == [choice["logprobs"]["tokens"] for choice in second["choices"]]
    assert len({json.dumps(text) for text in texts}) == 3
    assert first["usage"]["completion_tokens"] == 36


@pytest.mark.parametrize("path", GOOD)
def test_options_are_taken_and_refused_by_name_on_every_route(serve: Serve, path: str) -> None:
    ask(serve, path, diffusion={"steps": 2, "block_length": 4})
    wrong: dict[str, Any] = {
        "diffusion.steps": {"steps": 9},
        "diffusion.block_length": {"block_length": 3},
        "diffusion.threshold": {"threshold": 7},
        "diffusion.noise": {"noise": 1},
    }
    for name, options in wrong.items():
        status, text = serve.post(path, {"model": "tiny", **GOOD[path], "diffusion": options})
        assert status == 400, text
        assert name in error_in(text)["message"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"response_format": {"type": "json_object"}}, "guided_decoding.json"),
        ({"guided_regex": "a+"}, "guided_decoding.regex"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
    ids=str,
)
def test_what_makes_no_sense_for_a_diffusion_model_is_refused_by_name(serve: Serve, change: Json, name: str) -> None:
    status, text = serve.post(CHAT, {"model": "tiny", **GOOD[CHAT], **change})
    assert status == 400, text
    assert name in error_in(text)["message"]


def test_a_client_that_leaves_frees_everything(serve: Serve) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    connection = serve.open(COMPLETIONS, body)
    assert connection.recv(1)
    connection.close()
    eventually(lambda: serve.ended("cancelled") >= 1, what="the request is cancelled")
    serve.assert_quiet()


def test_a_prefill_worker_is_refused_at_the_start(model: Path) -> None:
    command = [BATON, "worker", "--role", "prefill", "--engine", "torch", "--model", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), check=False)
    assert done.returncode == 2
    assert "diffusion language model" in done.stderr
