"""The real SGLang keeps the rules of `ports/engine.py`. Rules that do not stop it share one engine."""

from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.ports.engine import EngineInfo, GenerateEngine, Work
from baton.testing.engine_contract import EngineContract
from baton.testing.engine_session import Session
from tests.real_sglang.engines import Bench, TestedEngine
from tests.real_sglang.hardware import EXACT


@pytest.fixture(scope="module", autouse=True)
def bench(tiny: Path) -> Iterator[None]:
    TestSglangEngine.model = tiny
    TestSglangEngine.bench = Bench()
    yield
    TestSglangEngine.bench.close()


class TestSglangEngine(EngineContract):
    model: Path
    bench: Bench
    limit_s = 120.0
    long_tokens = 1500

    def make_engine(self) -> GenerateEngine:
        return TestedEngine(self.model, "null", *EXACT)

    def make_broken_engine(self) -> GenerateEngine:
        return TestedEngine(self.model / "nowhere")

    def impossible(self, info: EngineInfo) -> list[Work]:
        return [msgspec.structs.replace(self.work(info), lora_name="not loaded")]

    def _run(self, body: Coroutine[Any, Any, None]) -> None:
        try:
            self.bench.run(body, self.limit_s)
        finally:
            self.bench.run(self.bench.tidy())

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        yield await self.bench.session(self.make_engine)

    _own_session = _session
