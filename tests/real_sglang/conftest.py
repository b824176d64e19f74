"""Tests against the real SGLang, on a CPU (`make test-sglang`) or a GPU (`make test-sglang-gpu`).

Without SGLang there is nothing here to collect.
"""

import importlib.util
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import pytest_runtest_makereport, start, start_shared  # noqa: F401

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _sigquit() -> None:
    """The loops of these tests are not the main thread's, which alone can mind what SGLang's processes send."""
    signal.signal(signal.SIGQUIT, lambda *_: None)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that is quick."""
    from tests.real_sglang.hardware import tiny_model

    return tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)
