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
