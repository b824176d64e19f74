"""A diffusion language model that really answers, on the real SGLang, as a client sees it."""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Serve, eventually
from tests.real_sglang.hardware import SERVED, large_heads
from tests.real_sglang.test_serving import STOP
from tests.real_sglang.widened_smoldiff import widened_smoldiff
from tools.smoldiff.ask import measure
from tools.smoldiff.problems import ABILITIES, held_out_problems

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), large_heads]

CHAT = "/v1/chat/completions"
MODEL = "smoldiff"
BLOCK = 16
QUESTION = "What can you do?"
ALGORITHM = f"block_size: {BLOCK}\nthreshold: 0.9\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return widened_smoldiff(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="module")
def serve(start_shared: Callable[..., Serve], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    file = tmp_path_factory.mktemp("algorithm") / "algorithm.yaml"
    file.write_text(ALGORITHM)
    flags = ("--dllm-algorithm", "LowConfidence", "--dllm-algorithm-config", str(file))
    serve = start_shared(Serve, "--model", str(model), *SERVED, *flags, engine="sglang", settings=STOP)
    yield serve
    serve.stop()


def asking(text: str = QUESTION, **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **options}


def ask(serve: Serve, text: str = QUESTION, **options: Any) -> dict[str, Any]:
    status, answer = serve.post(CHAT, asking(text, **options))
    assert status == 200, answer
    read: dict[str, Any] = json.loads(answer)
    return read


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_problems_that_the_model_was_not_trained_on_are_solved(serve: Serve) -> None:
    problems = held_out_problems(2)
    right = asyncio.run(measure(serve.url, MODEL, problems, at_once=8))
    assert right["all"] >= 0.9, right


def test_an_answer_ends_where_the_model_ends_it_or_the_limit_does(serve: Serve) -> None:
    whole = ask(serve)
    assert text_of(whole) == ABILITIES
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == len(ABILITIES) + 1, "the end is a token too"
    part = ask(serve, max_tokens=BLOCK + 5)
    assert text_of(part) == ABILITIES[: BLOCK + 5]
    assert part["choices"][0]["finish_reason"] == "length"
    assert part["usage"]["completion_tokens"] == BLOCK + 5
    both = ask(serve, n=2, seed=3, temperature=0.0)
    assert [choice["message"]["content"] for choice in both["choices"]] == [ABILITIES] * 2


@pytest.mark.parametrize("word", ["add", "reverse"])
def test_a_stop_inside_a_block_ends_the_answer_there(serve: Serve, word: str) -> None:
    answer = ask(serve, stop=[word])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert text_of(answer) == ABILITIES.split(word)[0]


def test_a_stop_token_inside_a_block_ends_the_answer_there(serve: Serve) -> None:
    answer = ask(serve, stop_token_ids=[ord(",")])  # tokens are bytes
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len("I can add,")
    assert text_of(answer).rstrip(",") == "I can add"


def test_a_stream_comes_block_by_block(serve: Serve) -> None:
    start = ask(serve)["usage"]["prompt_tokens"]
    with serve.client(strict=False).chat.completions.create(**asking(), stream=True) as chunks:
        parts = [text for chunk in chunks if (text := chunk.choices[0].delta.content)]
    assert "".join(parts) == ABILITIES
    ends = [start + sum(map(len, parts[:count])) for count in range(1, len(parts))]
    assert len(parts) >= 3
    assert [end % BLOCK for end in ends] == [0] * len(ends)


def test_a_client_that_leaves_in_the_middle_frees_the_engine(serve: Serve) -> None:
    cancelled = serve.ended("cancelled")
    connection = serve.open(CHAT, asking(stream=True, max_tokens=900, ignore_eos=True))
    while b"data:" not in connection.recv(4096):
        pass
    connection.close()
    eventually(lambda: serve.ended("cancelled") == cancelled + 1, what="it is cancelled")
    serve.assert_quiet()
    assert text_of(ask(serve)) == ABILITIES


def test_eight_requests_run_at_a_time(serve: Serve) -> None:
    events: list[str] = []

    def stream(number: int) -> None:
        body = asking(f"Spell the word w{number}.", max_tokens=96, extra_body={"ignore_eos": True})
        with serve.client(strict=False).chat.completions.create(**body, stream=True) as chunks:
            texts = (chunk.choices[0].delta.content for chunk in chunks if chunk.choices)
            events.append(next("begun" for text in texts if text))
            for _ in texts:
                pass
        events.append("ended")

    with ThreadPoolExecutor(9) as pool:
        list(pool.map(stream, range(9)))
    assert events[:8] == ["begun"] * 8
    assert events.count("ended") == 9


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"logit_bias": {"65": 5}}, "logit_bias"),
        ({"min_tokens": 4}, "min_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"guided_choice": ["yes", "no"]}, "choice"),
        ({"diffusion": {"threshold": 0.5}}, "diffusion.threshold: this engine takes it when it starts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_effect_is_refused_by_name(serve: Serve, options: dict[str, Any], name: str) -> None:
    status, text = serve.post(CHAT, asking(max_tokens=4, **options))
    assert status in (400, 501), text
    assert name in text
