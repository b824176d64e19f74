"""The engine contract over the built-in engine: with the native step, and with torch only."""

from pathlib import Path

import pytest

from baton.config.engines import ExpertOptions, TorchOptions
from baton.engines.torch.engine import TorchEngine
from baton.ports.engine import Engine
from baton.testing import EngineContract, HandoffContract
from tests.doubles.tiny_models import make_tiny_model


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> None:
    directory = make_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)
    for contract in (TestTorchEngine, TestTorchEngineWithoutNative):
        contract.directory = directory
    TestTorchEngineOfExperts.directory = make_tiny_model(
        tmp_path_factory.mktemp("experts"), "qwen2_moe", num_hidden_layers=2
    )


class TestTorchEngine(EngineContract, HandoffContract):
    directory: Path
    native = True
    experts = ExpertOptions()
    long_tokens = 1500
    limit_s = 60.0

    def make_engine(self) -> Engine:
        return self._engine(exports_kv=False)

    def make_producer(self) -> Engine:
        return self._engine(exports_kv=True)

    def _engine(self, exports_kv: bool) -> Engine:
        options = TorchOptions(
            dtype="float32", threads=1, blocks=800, max_running=4, batch_tokens=256, context=4096, native=self.native
        )
        return TorchEngine(options, self.directory, "tiny", exports_kv=exports_kv, experts=self.experts)

    def make_broken_engine(self) -> Engine:
        return TorchEngine(TorchOptions(), self.directory / "nowhere", "broken")


class TestTorchEngineWithoutNative(TestTorchEngine):
    native = False


class TestTorchEngineOfExperts(TestTorchEngine):
    experts = ExpertOptions(redundant=4, ranks=3)
