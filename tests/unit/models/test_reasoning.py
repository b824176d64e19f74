"""The token that ends reasoning is read from the tokenizer."""

import json
from pathlib import Path

import pytest

from baton.models.reasoning import reasoning_end_token


@pytest.mark.parametrize(
    ("text", "token"),
    [
        (json.dumps({"added_tokens": [{"id": 7, "content": "<think>"}, {"id": 8, "content": "</think>"}]}), 8),
        (json.dumps({"added_tokens": []}), None),
        (json.dumps({"model": {}}), None),
        ("not json", None),
        ("[]", None),
    ],
)
def test_the_end_of_reasoning_is_an_added_token(tmp_path: Path, text: str, token: int | None) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    assert reasoning_end_token(tmp_path) == token


def test_a_directory_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert reasoning_end_token(tmp_path) is None
