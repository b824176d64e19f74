"""Chat templates that cannot be used are reported, never replaced silently."""

import json
import logging
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from baton.engines.echo.engine import MODEL_DIR
from baton.errors import ConfigError, InvalidRequest, Unsupported
from baton.models.tokenizer import HubTokenizer, HubTokenTexts, PassageTokenizer

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


def test_template_of_the_processor_is_used_without_another(directory: Path) -> None:
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}?"}))
    assert HubTokenizer(directory).render_chat(MESSAGES) == "hi?"
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert HubTokenizer(directory).render_chat(MESSAGES) == "hi!"


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


def test_tokens_have_the_text_that_they_have_within_a_text(tmp_path: Path) -> None:
    vocabulary = {"<s>": 0, "▁": 1, "▁Hello": 2, "▁Paris": 3, "!": 4, "▁a": 5, "a": 6}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = HubTokenTexts(tmp_path)
    assert [texts.text_of(token) for token in (2, 3, 4, 0)] == [" Hello", " Paris", "!", "<s>"]
    assert texts.decode((2, 3, 4)) == ("Hello Paris!", [0, 5, 11])
    assert [texts.is_special(token) for token in (0, 1, 2)] == [True, False, False]


def test_tokens_of_one_character_begin_where_it_begins() -> None:
    texts = HubTokenTexts(MODEL_DIR)
    assert texts.decode(texts.encode("aé!")) == ("aé!", [0, 1, 1, 2])
    assert [texts.text_of(token) for token in texts.encode("aé")] == ["a", "�", "�"]


def test_a_model_without_a_readable_tokenizer_cannot_decode_prompts(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="tokenizer"):
        HubTokenTexts(tmp_path).decode((1, 2))
