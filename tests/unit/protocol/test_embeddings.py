"""The embeddings format: every form of input that OpenAI has, and one clear line for everything else."""

import pytest

from baton.protocol.codec import DecodeError
from baton.protocol.embeddings import (
    MAX_INPUTS,
    Embeddings,
    EmbedRequest,
    Texts,
    TokenLists,
    decode_embed,
    encode_embeddings,
)


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ("hello", Texts(("hello",))),
        (["hello", "world"], Texts(("hello", "world"))),
        ([1, 2, 3], TokenLists(((1, 2, 3),))),
        ([[1, 2], [3]], TokenLists(((1, 2), (3,)))),
        ([" "], Texts((" ",))),
    ],
)
def test_every_form_of_input_decodes(given: object, source: Texts | TokenLists) -> None:
    assert decode_embed({"model": "m", "input": given}) == EmbedRequest(model="m", source=source)


def test_options_are_read_and_unknown_keys_ignored() -> None:
    body = {"model": "m", "input": "a", "dimensions": 3, "encoding_format": "base64", "user": "me", "nvext": {}}
    assert decode_embed(body).dimensions == 3
    assert decode_embed({**body, "dimensions": None, "encoding_format": None, "user": None}).dimensions is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"model": "m"}, "input"),
        ({"input": "a"}, "model"),
        ({"model": "m", "input": None}, "input"),
        ({"model": "m", "input": 5}, "input"),
        ({"model": "m", "input": {"a": 1}}, "input"),
        ({"model": "m", "input": [1.5]}, "input"),
        ({"model": "m", "input": [-1]}, "input"),
        ({"model": "m", "input": [2**32]}, "input"),
        ({"model": "m", "input": [[[1]]]}, "input"),
        ({"model": "m", "input": ["a", 1]}, "mixed"),
        ({"model": "m", "input": ["a", [1]]}, "mixed"),
        ({"model": "m", "input": [1, [1]]}, "mixed"),
        ({"model": "m", "input": []}, "input: the list is empty"),
        ({"model": "m", "input": ""}, r"input\[0\]"),
        ({"model": "m", "input": ["a", ""]}, r"input\[1\]"),
        ({"model": "m", "input": [[1], []]}, r"input\[1\]"),
        ({"model": "m", "input": ["a"] * (MAX_INPUTS + 1)}, str(MAX_INPUTS)),
        ({"model": "m", "input": "a", "dimensions": "many"}, "dimensions"),
        ({"model": "m", "input": "a", "encoding_format": "zip"}, "encoding_format"),
        ([], "object"),
        (None, "object"),
    ],
    ids=str,
)
def test_an_invalid_body_is_refused_by_field(body: object, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        decode_embed(body)


def test_the_maximum_number_of_inputs_is_accepted() -> None:
    source = decode_embed({"model": "m", "input": ["a"] * MAX_INPUTS}).source
    assert len(source.items) == MAX_INPUTS


def test_embeddings_are_encoded_in_openai_format() -> None:
    assert encode_embeddings(Embeddings(model="m", vectors=("AAAA", "BBBB"), prompt_tokens=7)) == {
        "object": "list",
        "model": "m",
        "data": [
            {"object": "embedding", "index": 0, "embedding": "AAAA"},
            {"object": "embedding", "index": 1, "embedding": "BBBB"},
        ],
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
