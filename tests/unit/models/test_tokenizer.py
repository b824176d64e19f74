"""Chat templates that cannot be used are reported, never replaced silently."""

import json
import logging
from pathlib import Path

import pytest

from baton.engines.echo.engine import MODEL_DIR
from baton.errors import ConfigError, InvalidRequest
from baton.models.tokenizer import HubTokenizer

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
