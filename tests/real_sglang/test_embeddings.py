"""Embeddings of a decoder model with the real SGLang, as a client sees them."""

import base64
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Serve, error_in
from tests.real_sglang.hardware import HIDDEN, SERVED, VECTOR_TOLERANCE, tiny_model
from tests.real_sglang.test_serving import STOP

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MODEL = "embedder"
SIZE = HIDDEN
CAT = "A cat is sleeping on the sofa."
TRAINED_SIZES = [8, 16]


LAST_HIDDEN_STATE = """
import json, sys
import torch, transformers
decoder = transformers.AutoModel.from_pretrained(sys.argv[1]).eval()
with torch.inference_mode():
    last = decoder(torch.tensor([json.loads(sys.argv[2])])).last_hidden_state[0, -1]
print(json.dumps((last / last.norm()).tolist()))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder that declares that it was trained for shorter vectors."""
    directory = tiny_model(tmp_path_factory.mktemp("models") / MODEL, num_hidden_layers=2)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": TRAINED_SIZES}))
    return directory


@pytest.fixture(scope="module")
def serve(start_shared: Callable[..., Serve], model: Path) -> Iterator[Serve]:
    serve = start_shared(Serve, "--model", str(model), "--role", "embed", *SERVED, engine="sglang", settings=STOP)
    yield serve
    serve.stop()


def embed(serve: Serve, given: Any, **options: Any) -> list[list[float]]:
    answer = serve.client().embeddings.create(model=MODEL, input=given, encoding_format="float", **options)
    return [entry.embedding for entry in answer.data]


def norm(vector: list[float]) -> float:
    return float(sum(number * number for number in vector) ** 0.5)


@pytest.fixture(scope="module")
def tokens(model: Path) -> list[int]:
    import transformers

    ids: list[int] = transformers.AutoTokenizer.from_pretrained(model)(CAT)["input_ids"]
    return ids


def test_the_vector_is_the_normalized_last_hidden_state(serve: Serve, model: Path, tokens: list[int]) -> None:
    # In a process of its own: SGLang, once it is imported, changes what transformers computes.
    computed = subprocess.run(
        [sys.executable, "-c", LAST_HIDDEN_STATE, str(model), json.dumps(tokens)], capture_output=True, check=True
    )
    [vector] = embed(serve, CAT)
    assert vector == pytest.approx(json.loads(computed.stdout.splitlines()[-1]), abs=VECTOR_TOLERANCE)


def test_every_form_of_input_gives_the_same_vector_and_its_usage(serve: Serve, tokens: list[int]) -> None:
    [expected] = embed(serve, CAT)
    for given in ([CAT], tokens, [tokens], ["other", CAT], [[5, 6], tokens]):
        assert embed(serve, given)[-1] == pytest.approx(expected, abs=VECTOR_TOLERANCE / 10)
    answer = serve.client().embeddings.create(model=MODEL, input=[CAT, CAT], encoding_format="float")
    assert answer.usage.prompt_tokens == 2 * len(tokens)


def test_floats_and_base64_are_the_same_numbers(serve: Serve) -> None:
    [floats] = embed(serve, CAT)
    status, text = serve.post("/v1/embeddings", {"model": MODEL, "input": CAT, "encoding_format": "base64"})
    assert status == 200, text
    data = base64.b64decode(json.loads(text)["data"][0]["embedding"])
    assert list(struct.unpack(f"<{SIZE}f", data)) == pytest.approx(floats, abs=VECTOR_TOLERANCE / 10)


def test_dimensions_of_the_model_shorten_and_others_are_refused(serve: Serve) -> None:
    [whole], [short] = embed(serve, CAT), embed(serve, CAT, dimensions=8)
    assert short == pytest.approx([number / norm(whole[:8]) for number in whole[:8]], abs=VECTOR_TOLERANCE / 10)
    assert embed(serve, CAT, dimensions=SIZE)[0] == pytest.approx(whole, abs=VECTOR_TOLERANCE / 10)
    status, text = serve.post("/v1/embeddings", {"model": MODEL, "input": CAT, "dimensions": 9})
    assert status == 400, text
    assert "8, 16" in error_in(text)["message"]


def test_an_input_that_is_too_long_is_refused_with_its_index(serve: Serve) -> None:
    status, text = serve.post("/v1/embeddings", {"model": MODEL, "input": ["a", "a" * 5000]})
    assert status == 400, text
    assert "input[1]" in error_in(text)["message"]
