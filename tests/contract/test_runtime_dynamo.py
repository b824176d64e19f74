"""The runtime contract over ai-dynamo-runtime: file discovery, requests over TCP, all in this process."""

from pathlib import Path

import pytest

from baton.ports.runtime import Runtime
from baton.runtimes.dynamo.options import RuntimeOptions
from baton.runtimes.dynamo.runtime import DynamoRuntime
from baton.testing import RuntimeContract


class TestDynamoRuntime(RuntimeContract):
    @pytest.fixture(autouse=True)
    def _fresh_discovery(self, tmp_path: Path) -> None:
        self._options = RuntimeOptions(directory=str(tmp_path / "discovery"))

    def make_runtime(self) -> Runtime:
        return DynamoRuntime(self._options)
