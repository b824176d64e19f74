"""A request can ask for its own prompt and its scores, which are those of transformers, and for logits of its own."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.tiny_models import make_tiny_model
from tests.e2e.harness import Serve, eventually

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MODEL = "tiny"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "The quick brown fox jumps over the lazy dog"
Json = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / MODEL, seed=3)


@pytest.fixture(scope="module")
def serve(start_shared: Callable[..., Serve], model: Path) -> Iterator[Serve]:
    serve = start_shared(Serve, "--model", str(model), "--torch-dtype", "float32", engine="torch")
    yield serve
    serve.stop()


@pytest.fixture(scope="module")
def reference(model: Path) -> Callable[[Sequence[int]], Any]:
    """Return the log-probabilities [tokens, vocabulary] of what follows each token, by transformers."""
    causal = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def logprobs(tokens: Sequence[int]) -> Any:
        with torch.no_grad():
            return torch.log_softmax(causal(torch.tensor([list(tokens)])).logits[0], dim=-1)

    return logprobs


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(model)


def ask(serve: Serve, path: str = COMPLETIONS, **body: Any) -> Json:
    start: Json = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": PROMPT}
    status, text = serve.post(path, {"model": MODEL, "temperature": 0, "max_tokens": 4, **start, **body})
    assert status == 200, text
    answer: Json = json.loads(text)
    return answer


def test_echo_with_logprobs_and_no_tokens_scores_the_prompt_as_transformers_does(
    serve: Serve, reference: Callable[[Sequence[int]], Any], tokenizer: Any
) -> None:
    tokens = tokenizer.encode(PROMPT)
    expected = reference(tokens)
    (choice,) = ask(serve, echo=True, logprobs=2, max_tokens=0)["choices"]
    scores = choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert scores["tokens"] == [tokenizer.decode([token]) for token in tokens]
    assert scores["text_offset"] == list(range(len(PROMPT)))
    assert (scores["token_logprobs"][0], scores["top_logprobs"][0]) == (None, None)
    for place, token in enumerate(tokens[1:], 1):
        row = expected[place - 1]
        assert scores["token_logprobs"][place] == pytest.approx(float(row[token]), abs=1e-4)
        listed = [*reversed(torch.topk(row, 2).indices.tolist()), token]  # of tokens with one text, the last one counts
        best = {tokenizer.decode([other]): float(row[other]) for other in listed}
        assert scores["top_logprobs"][place] == pytest.approx(best, abs=1e-4)


def test_prompts_in_one_request_are_scored_each(
    serve: Serve, reference: Callable[[Sequence[int]], Any], tokenizer: Any
) -> None:
    prompts = [tokenizer.encode(text) for text in ("The d", "Hi", "The dog")]
    answer = ask(serve, prompt=prompts, echo=True, logprobs=1, max_tokens=1)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        expected = reference(prompt)
        found = choice["logprobs"]["token_logprobs"]
        assert len(found) == len(prompt) + 1
        assert found[1:-1] == pytest.approx(
            [float(expected[at][token]) for at, token in enumerate(prompt[1:])], abs=1e-4
        )
        assert found[-1] == pytest.approx(float(expected[-1].max()), abs=1e-4), "the generated token is the best"
        assert choice["text"].startswith(tokenizer.decode(prompt))
    assert answer["usage"]["prompt_tokens"] == 14
    assert answer["usage"]["completion_tokens"] == 3


def test_a_stop_string_loses_no_scores(serve: Serve) -> None:
    whole = ask(serve, max_tokens=8)["choices"][0]["text"]
    (choice,) = ask(serve, max_tokens=8, echo=True, logprobs=0, stop=[whole[1]])["choices"]
    assert choice["text"] == PROMPT + whole[:1]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["token_logprobs"]) >= len(PROMPT) + 1


def test_an_echo_can_be_streamed(serve: Serve) -> None:
    with serve.client(strict=False) as client:
        chunks = list(client.completions.create(model=MODEL, prompt=PROMPT, echo=True, max_tokens=4, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices).startswith(PROMPT)


def test_prompt_logprobs_of_a_chat_and_a_completion(serve: Serve, tokenizer: Any) -> None:
    (choice,) = ask(serve, prompt_logprobs=1)["choices"]
    assert len(choice["prompt_logprobs"]) == len(PROMPT)
    assert not choice["text"].startswith(PROMPT)
    entry = choice["prompt_logprobs"][1][str(tokenizer.encode("h")[0])]
    assert entry["decoded_token"] == "h"
    chat = ask(serve, CHAT, prompt_logprobs=0)
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_token_ids_of_prompt_and_answer(serve: Serve, tokenizer: Any) -> None:
    (choice,) = ask(serve, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == tokenizer.encode(PROMPT)
    assert len(choice["token_ids"]) == 4
    assert tokenizer.decode(choice["token_ids"]) == choice["text"]
    chat = ask(serve, CHAT, return_token_ids=True)
    assert "nvext" not in chat
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]


def test_a_prompt_is_truncated_from_the_left(serve: Serve) -> None:
    answer = ask(serve, truncate_prompt_tokens=3, echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == "dog"
    assert ask(serve, truncate_prompt_tokens=3)["choices"] == ask(serve, prompt="dog")["choices"]


def test_logit_bias_changes_what_is_sampled(serve: Serve, tokenizer: Any) -> None:
    (letter,) = tokenizer.encode("Q")
    assert ask(serve, logit_bias={str(letter): 100})["choices"][0]["text"] == "QQQQ"
    chat = ask(serve, CHAT, logit_bias={str(letter): 100})
    assert chat["choices"][0]["message"]["content"] == "QQQQ"


def test_bad_words_are_not_generated(serve: Serve, tokenizer: Any) -> None:
    (first, second) = tokenizer.encode("QR")
    bias = {str(first): 100, str(second): 80}
    assert ask(serve, logit_bias=bias, bad_words=["Q"])["choices"][0]["text"] == "RRRR"
    assert ask(serve, logit_bias=bias, bad_words=["QQ"])["choices"][0]["text"] == "QRQR"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"stop_regex": "a+"}, "stop_regex"),
        ({"structural_tag": {"type": "structural_tag", "format": {}}}, "structural_tag"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"prompt_logprobs": 30}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_what_this_engine_cannot_do_is_refused_by_name(serve: Serve, body: Json, name: str) -> None:
    status, text = serve.post(COMPLETIONS, {"model": MODEL, "prompt": "a", "max_tokens": 2, **body})
    assert status == 400, text
    assert name in json.loads(text)["error"]["message"]
    serve.assert_quiet()


def test_a_client_that_leaves_ends_all_its_prompts(serve: Serve) -> None:
    body = {"model": MODEL, "prompt": ["a", "b", "c"], "echo": True, "max_tokens": 4000, "ignore_eos": True}
    before = serve.ended("cancelled")
    connection = serve.open(COMPLETIONS, body)
    try:
        eventually(lambda: serve.metric("baton_requests_in_flight") == 3, what="three requests run")
    finally:
        connection.close()
    serve.assert_quiet()
    assert serve.ended("cancelled") == before + 3
