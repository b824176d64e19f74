"""What the adapter takes from SGLang's modules, for tests without SGLang."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def install(monkeypatch: pytest.MonkeyPatch, path: str, **names: Any) -> ModuleType:
    """Make the module `path` importable with `names`, and its packages without any."""
    for end in [at for at, letter in enumerate(path) if letter == "."]:
        if path[:end] not in sys.modules:
            monkeypatch.setitem(sys.modules, path[:end], ModuleType(path[:end]))
    module = ModuleType(path)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, path, module)
    return module


@pytest.fixture
def io_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests to SGLang's scheduler: each is its fields."""
    module = install(monkeypatch, "sglang.srt.managers.io_struct")

    def request(name: str) -> Any:
        if name.endswith("ReqInput"):
            return lambda **fields: SimpleNamespace(**fields)
        raise AttributeError(name)

    vars(module)["__getattr__"] = request


class ThinkingOptions:
    """What decides about thinking budgets besides the arguments."""

    def __init__(self) -> None:
        self.max_think_tokens = -1


@pytest.fixture
def thinking(monkeypatch: pytest.MonkeyPatch) -> ThinkingOptions:
    """SGLang's parsers `qwen3` and `deepseek-r1`, and its environment. It knows others only in a running engine."""
    options = ThinkingOptions()
    excluded = {"qwen3": ["<tool_call>"], "deepseek-r1": None}

    def parser(model_type: str, stream_reasoning: bool) -> Any:
        if model_type not in excluded:
            raise ValueError(model_type)
        return SimpleNamespace(detector=SimpleNamespace(think_excluded_tokens=excluded[model_type]))

    limit = SimpleNamespace(get=lambda: options.max_think_tokens)
    install(monkeypatch, "sglang.srt.environ", envs=SimpleNamespace(SGLANG_MAX_THINK_TOKENS=limit))
    install(monkeypatch, "sglang.srt.parser.reasoning_parser", ReasoningParser=parser)
    return options
