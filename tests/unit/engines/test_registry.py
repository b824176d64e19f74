"""Settings are completed by the model before any process starts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.config.engines import TorchOptions
from baton.config.settings import Settings
from baton.engines.registry import prepare_model, start_warning
from baton.errors import ConfigError
from tests.doubles.chat_model import make_chat_model


def prepare(model: Path, **settings: Any) -> Settings:
    return prepare_model(Settings(engine="echo", model=str(model), **settings))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_chat_model(tmp_path / "qwen")


def test_parsers_follow_the_family_unless_they_are_set(model: Path) -> None:
    found, chosen = prepare(model), prepare(model, tool_call_parser="none", reasoning_parser="basic")
    assert (found.tool_call_parser, found.reasoning_parser) == ("hermes", "qwen3")
    assert (chosen.tool_call_parser, chosen.reasoning_parser) == ("none", "basic")
    assert prepare_model(found) == found


def test_several_templates_are_all_read_for_the_family(model: Path) -> None:
    named = [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "<tool_call>"}]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert prepare(model).tool_call_parser == "hermes"


def test_the_template_of_the_user_decides_on_the_parsers(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% break %}{% endfor %}")
    settings = prepare(model, chat_template=str(template))
    assert (settings.tool_call_parser, settings.chat_template) == ("none", str(template.resolve()))


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "No such file"), (b"\xff", "cannot read"), (b"{% for %}", r"mine\.jinja"), (b"Hello!", "does not use")],
)
def test_a_file_that_is_no_chat_template_is_refused(
    model: Path, tmp_path: Path, content: bytes | None, problem: str
) -> None:
    template = tmp_path / "mine.jinja"
    if content is not None:
        template.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        prepare(model, chat_template=str(template))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"device": "cpu"}, "apt install g++"),
        ({"device": "cpu", "native": False}, None),  # it is not used anyway
        ({"device": "cuda"}, None),
    ],
)
def test_a_missing_compiler_is_named_with_its_cost_where_it_would_be_used(
    model: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], expected: str | None
) -> None:
    settings = Settings(engine="torch", model=str(model), torch=TorchOptions(**flags))
    monkeypatch.setenv("CXX", "no-such-compiler")
    warning = start_warning(settings)
    assert warning is None if expected is None else expected in (warning or "")
    monkeypatch.setenv("CXX", sys.executable)
    assert start_warning(settings) is None
