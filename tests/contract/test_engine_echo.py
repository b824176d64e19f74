"""The engine contract over the echo engine: paced, with a prefill phase, few slots and a small cache."""

from pathlib import Path

from baton.engines.echo import EchoEngine, EchoOptions
from baton.ports.engine import Engine
from baton.testing import EngineContract
from baton.testing.handoff_contract import HandoffContract


class TestEchoEngine(EngineContract):
    def make_engine(self) -> Engine:
        return EchoEngine(EchoOptions(pace_ms=1, prefill_ms=5, max_running=4, blocks=1024))

    def make_broken_engine(self) -> Engine:
        return EchoEngine(model_dir=Path("no/such/model"))


class TestEchoEngineHandsOff(HandoffContract):
    """With a KV cache of its own."""

    def make_engine(self) -> Engine:
        return EchoEngine(EchoOptions(pace_ms=1, prefill_ms=5, max_running=4, blocks=1024), keeps_kv=True)


class TestEchoEngineFlatOut(EngineContract):
    """Without a pace the engine is done as fast as the loop turns, so a long request needs many tokens."""

    long_tokens = 200_000

    def make_engine(self) -> Engine:
        return EchoEngine(EchoOptions(max_running=4, blocks=65_536))
