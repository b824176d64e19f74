"""Embeddings with a real model, through the official client: the demo model `minilm`, which comes from PyPI."""

import base64
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from baton.config.directories import cache_directory  # noqa: E402
from baton.config.settings import Settings  # noqa: E402
from baton.errors import ConfigError  # noqa: E402
from baton.models.demo import DEMOS, prepare_demo  # noqa: E402
from tests.e2e.harness import Cluster, Serve, error_in, eventually  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CAT = "A cat is sleeping on the sofa."
KITTEN = "A kitten naps on the couch."
MARKET = "The stock market fell sharply today."
SIZE = 384
LONGEST = 256
LARGE = {"model": "minilm", "input": [[101] * 250] * 2048}  # takes minutes


@pytest.fixture(scope="module")
def model() -> Path:
    """The directory of the model; fetched once, for the tests and for the workers alike."""
    try:
        return prepare_demo(DEMOS["minilm"], cache_directory(Settings()) / "models")
    except ConfigError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def serve(start_shared: Callable[..., Serve], model: Path) -> Iterator[Serve]:
    serve = start_shared(Serve, "--model", "minilm", engine="torch")
    yield serve
    serve.stop()


def embed(serve: Serve, given: Any, **options: Any) -> list[list[float]]:
    answer = serve.client().embeddings.create(model="minilm", input=given, encoding_format="float", **options)
    assert [entry.index for entry in answer.data] == list(range(len(answer.data)))
    return [entry.embedding for entry in answer.data]


def dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def test_a_paraphrase_is_nearer_than_another_matter(serve: Serve) -> None:
    # Not strict: the client asks for base64 by itself, and validates it before it makes numbers of it.
    answer = serve.client(strict=False).embeddings.create(model="minilm", input=[CAT, KITTEN, MARKET])
    cat, kitten, market = (entry.embedding for entry in answer.data)
    assert len(cat) == SIZE
    assert dot(cat, cat) == pytest.approx(1.0, abs=1e-5)
    assert dot(cat, kitten) > 0.5 > dot(cat, market) + 0.2
    assert (answer.object, answer.model, answer.data[0].object) == ("list", "minilm", "embedding")
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 10 + 10 + 9


def test_vectors_are_those_of_plain_transformers(serve: Serve, model: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    encoder = transformers.AutoModel.from_pretrained(model).eval()
    for text, vector in zip([CAT, MARKET], embed(serve, [CAT, MARKET]), strict=True):
        with torch.inference_mode():
            mean = encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(dim=0)
        assert vector == pytest.approx((mean / mean.norm()).tolist(), abs=1e-5)


def test_every_form_of_input_gives_the_same_vector(serve: Serve, model: Path) -> None:
    tokens = transformers.AutoTokenizer.from_pretrained(model)(CAT)["input_ids"]
    [expected] = embed(serve, CAT)
    for given in ([CAT], tokens, [tokens], [CAT, MARKET], [[101, 102], tokens]):
        vectors = embed(serve, given)
        same = vectors[-1] if given == [[101, 102], tokens] else vectors[0]
        assert same == pytest.approx(expected, abs=1e-5)


def test_floats_and_base64_are_the_same_numbers(serve: Serve) -> None:
    [floats] = embed(serve, CAT)
    status, text = serve.post("/v1/embeddings", {"model": "minilm", "input": CAT, "encoding_format": "base64"})
    assert status == 200
    data = base64.b64decode(json.loads(text)["data"][0]["embedding"])
    assert list(struct.unpack(f"<{SIZE}f", data)) == pytest.approx(floats, abs=1e-5)


def test_dimensions_may_name_the_size_of_the_vector(serve: Serve) -> None:
    assert embed(serve, CAT, dimensions=SIZE)[0] == pytest.approx(embed(serve, CAT)[0], abs=1e-5)


def test_a_vector_does_not_depend_on_what_else_is_embedded(serve: Serve) -> None:
    texts = [f"{CAT} " * (number % 9 + 1) + str(number) for number in range(60)]
    together = embed(serve, texts)
    for number in (0, 7, 59):
        assert embed(serve, texts[number])[0] == pytest.approx(together[number], abs=1e-5)


@pytest.mark.slow
def test_as_many_inputs_as_openai_takes(serve: Serve) -> None:
    vectors = embed(serve, [[101, 1000 + number, 102] for number in range(2048)])
    assert len(vectors) == 2048
    assert vectors[5] == pytest.approx(embed(serve, [101, 1005, 102])[0], abs=1e-5)


def test_a_text_that_just_fits_is_embedded(serve: Serve) -> None:
    assert len(embed(serve, "cat " * (LONGEST - 2))[0]) == SIZE


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": []}, "'input': empty array"),
        ({"input": ""}, "'input'"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": ["a", "cat " * (LONGEST - 1)]}, "input[1]: this model's maximum context length is"),
        ({"input": [101] * (LONGEST + 1)}, "input[0]: this model's maximum context length is"),
        ({"input": [30522]}, "30522 is not a token"),
        ({"input": ["a"] * 2049}, "2048"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 32}, "trained"),
        ({"input": "a", "dimensions": SIZE + 1}, "dimensions"),
        ({"input": "a", "dimensions": -1}, "-1"),
        ({"input": "a", "dimensions": "x"}, "expected an integer"),
        ({"input": "a", "encoding_format": "zip"}, "zip"),
        ({"input": ["a", 1]}, "items must be of one type"),
        ({"input": [1.5]}, "'input[0]'"),
        ({"input": None}, "got null"),
        ({"input": "a", "input_type": "query"}, "input_type"),
        ({}, "input"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_request_is_a_400_that_says_why(serve: Serve, body: dict[str, Any], words: str) -> None:
    status, text = serve.post("/v1/embeddings", {"model": "minilm", **body})
    assert status == 400
    assert words in error_in(text)["message"]


def test_only_what_the_model_is_for_is_served(serve: Serve) -> None:
    with pytest.raises(openai.NotFoundError):
        serve.client().embeddings.create(model="nobody", input="a")
    with pytest.raises(openai.NotFoundError):
        serve.client().chat.completions.create(model="minilm", messages=[{"role": "user", "content": "Hello"}])
    (model,) = serve.client().models.list()
    assert (model.id, model.capabilities["embeddings"], model.capabilities["chat"]) == ("minilm", True, False)


def test_a_client_that_leaves_frees_the_engine(serve: Serve) -> None:
    before = serve.ended("cancelled", role="embed")
    serve.assert_quiet()
    connection = serve.open("/v1/embeddings", LARGE)
    eventually(lambda: serve.load()["running"] == 1, what="the request runs")
    connection.close()
    eventually(lambda: serve.ended("cancelled", role="embed") == before + 1, 60, "the request is cancelled")
    serve.assert_quiet()
    assert len(embed(serve, CAT)[0]) == SIZE


def test_a_small_request_does_not_wait_for_a_large_one(serve: Serve) -> None:
    serve.assert_quiet()
    connection = serve.open("/v1/embeddings", LARGE)
    try:
        eventually(lambda: serve.load()["running"] == 1, what="the large request runs")
        assert len(embed(serve, CAT)[0]) == SIZE
        assert serve.metric("baton_requests_in_flight") == 1
    finally:
        connection.close()
    serve.assert_quiet()


@pytest.mark.slow
def test_workers_on_one_machine_share_its_cores(start: Callable[..., Serve], model: Path) -> None:
    serve = start(Serve, "--model", str(model), "--name", "mine", engine="torch", workers=2)
    environments = [serve.worker(number).environ() for number in range(2)]
    assert all(int(variables["BATON_TORCH_THREADS"]) >= 1 for variables in environments)
    assert [entry.id for entry in serve.client().models.list()] == ["mine"]
    answer = serve.client().embeddings.create(model="mine", input=CAT, encoding_format="float")
    assert len(answer.data[0].embedding) == SIZE
    serve.stop()


@pytest.mark.slow
def test_a_request_that_runs_finishes_when_its_worker_is_told_to_stop(
    start: Callable[..., Cluster], model: Path
) -> None:
    cluster = start(Cluster, "--model", "minilm", engine="torch")
    connection = cluster.open("/v1/embeddings", {"model": "minilm", "input": ["cat " * 100] * 64})
    eventually(lambda: cluster.load()["running"] == 1, what="the request runs")
    [worker] = cluster.processes
    worker.popen.terminate()
    answer = b""
    while b'"usage"' not in answer:
        piece = connection.recv(65536)
        assert piece, answer[-300:]
        answer += piece
    connection.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert worker.wait() == 0
