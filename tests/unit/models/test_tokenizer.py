"""Chat templates that cannot be used are reported, never replaced silently."""

import json
import logging
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, processors

from baton.engines.echo.engine import MODEL_DIR
from baton.errors import ConfigError, InvalidRequest
from baton.models.tokenizer import HubTokenizer, PassageTokenizer

MESSAGES: list[dict[str, object]] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes((MODEL_DIR / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    return tmp_path


def test_template_file_is_used_without_a_template_in_the_configuration(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert HubTokenizer(directory).render_chat(MESSAGES) == "hi!"
    assert HubTokenizer(directory).render_chat(MESSAGES, {"messages": []}) == "hi!"


@pytest.mark.parametrize("eos", ["<|endoftext|>", {"content": "<|endoftext|>"}], ids=["text", "object"])
def test_special_tokens_of_the_settings_are_added_once(tmp_path: Path, eos: object) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.add_special_tokens(["<s>", "<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "add_bos_token": False, "eos_token": eos, "add_eos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert PassageTokenizer(tmp_path).encode_batch(["ab"]) == [[0, 1, 3]]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": True}))
    assert PassageTokenizer(tmp_path).encode_batch(["ab"]) == [[2, 0, 1, 3]]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 2)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert PassageTokenizer(tmp_path).encode_batch(["ab"]) == [[2, 0, 1, 3]]


def test_template_with_a_syntax_error_is_refused(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="cannot read the chat template"):
        HubTokenizer(directory)


def test_unreadable_template_file_is_refused(directory: Path) -> None:
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot read the chat template"):
        HubTokenizer(directory)


def test_template_that_is_not_a_string_is_ignored_with_a_warning(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = [{"name": "default", "template": "x"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    with caplog.at_level(logging.WARNING):
        tokenizer = HubTokenizer(directory)
    assert "it is a list, not a string" in caplog.text
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat(MESSAGES)
