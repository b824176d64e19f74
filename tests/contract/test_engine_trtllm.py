"""The TensorRT-LLM adapter keeps the rules of `ports/engine.py`, over a double of each supported version."""

from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from baton.config.engines import TrtllmOptions
from baton.engines.echo.engine import MODEL_DIR
from baton.engines.trtllm.adapter import TrtllmEngine
from baton.ports.engine import EngineInfo, GenerateEngine, Work
from baton.testing.engine_contract import EngineContract
from tests.doubles.trtllm import World, make_library

ARGUMENTS = (
    "--max_batch_size=4",
    "--max_seq_len=8192",
    "--max_num_tokens=8192",
    "--kv_cache_config.tokens_per_block=16",
    "--kv_cache_config.max_tokens=16384",
)


class TestTrtllmEngine13(EngineContract):
    version = "1.3.0rc22"

    def make_engine(self) -> GenerateEngine:
        return self._engine(MODEL_DIR)

    def make_broken_engine(self) -> GenerateEngine:
        return self._engine(Path("no/such/model"))

    def impossible(self, info: EngineInfo) -> list[Work]:
        return [msgspec.structs.replace(self.work(info), lora_name="not loaded")]

    def _engine(self, directory: Path) -> GenerateEngine:
        library = make_library(self.version, World(), CollectorRegistry())
        return TrtllmEngine(TrtllmOptions(poll_ms=20), ARGUMENTS, directory, "double", None, library)


class TestTrtllmEngine12(TestTrtllmEngine13):
    version = "1.2.1"


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc25"])
def test_the_double_has_the_version_that_it_stands_for(version: str) -> None:
    assert make_library(version, World(), CollectorRegistry()).features.version == version
