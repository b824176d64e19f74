"""SGLang engines for tests: small, and shared where a test does not stop them.

An engine belongs to the event loop that it was started in, so one loop on one thread outlives the tests of a module.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from baton.config.engines import ExpertOptions, SglangOptions
from baton.engine_kit.output_stream import OutputStream
from baton.engines.sglang.adapter import SglangEmbedder, SglangEngine
from baton.engines.sglang.launch_mode import LaunchMode
from baton.errors import EngineDead
from baton.ports.engine import EngineInfo, Work
from baton.protocol.events import KvEvent, LoadSnapshot
from baton.protocol.ids import RequestId
from baton.testing.bounded import eventually
from baton.testing.engine_session import Session
from tests.real_sglang.hardware import SMALL

T = TypeVar("T")
Mode = Literal["null", "prefill", "decode"]


class TestedEngine(SglangEngine):
    """An engine that remembers what it was given and whether it was stopped."""

    __test__ = False

    def __init__(
        self,
        model: Path,
        mode: Literal["null", "prefill", "decode"] = "null",
        *more: str,
        experts: ExpertOptions | None = None,
        from_encoders: bool = False,
        **options: Any,
    ) -> None:
        chosen = SglangOptions(**({"metrics": False} | options))
        super().__init__(chosen, (*SMALL, *more), model, "tiny", LaunchMode(mode), experts, from_encoders)
        self.given: list[RequestId] = []
        self.is_stopped = False

    def submit(self, work: Work) -> OutputStream:
        """Take the work, and remember it."""
        stream = super().submit(work)
        self.given.append(work.request_id)
        return stream

    async def stop(self) -> None:
        """Stop, and remember that."""
        self.is_stopped = True
        await super().stop()


class TestedEmbedder(SglangEmbedder):
    """An embedder that remembers whether it was stopped."""

    __test__ = False

    def __init__(self, model: Path) -> None:
        super().__init__(SglangOptions(metrics=False), SMALL, model, "tiny")
        self.is_stopped = False

    async def stop(self) -> None:
        """Stop, and remember that."""
        self.is_stopped = True
        await super().stop()


class Bench:
    """An event loop on a thread, and at most one engine in it, which is started when it is wanted."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="bench", daemon=True)
        self._thread.start()
        self._session: Session | None = None
        self._listening: asyncio.Task[None] | None = None

    def run(self, body: Coroutine[Any, Any, T], limit_s: float = 60.0) -> T:
        """Run `body` in the loop and return its result. Raises AssertionError after `limit_s`."""

        async def limited() -> T:
            try:
                async with asyncio.timeout(limit_s) as limit:
                    return await body
            except TimeoutError as error:
                if limit.expired():
                    raise AssertionError(f"not finished after {limit_s:g} s") from error
                raise

        return asyncio.run_coroutine_threadsafe(limited(), self.loop).result(limit_s + 30)

    async def session(self, make: Any) -> Session:
        """Return the engine that runs, or start the one that `make` returns."""
        if self._session is None:
            engine = make()
            info: EngineInfo = await engine.start()
            session = self._session = Session(engine, info)
            self._listening = asyncio.create_task(session.listen())
            await eventually(lambda: session.used_blocks() is not None)
        return self._session

    async def tidy(self) -> None:
        """Take back what a test has left in the engine; forget an engine that it has stopped."""
        session = self._session
        if session is None:
            return
        engine = session.engine
        assert isinstance(engine, TestedEngine | TestedEmbedder)
        if engine.is_stopped:
            self._session = None
            assert self._listening is not None
            with suppress(EngineDead):  # what a test has let it die of
                await self._listening
            return
        if isinstance(engine, TestedEmbedder):
            return
        given, engine.given = engine.given, []
        await asyncio.gather(*(engine.abort(request_id) for request_id in given))

    async def stop_engine(self) -> None:
        """Stop the engine, if one runs."""
        if self._session is not None:
            await self._session.engine.stop()
            await self.tidy()

    def close(self) -> None:
        """End the engine and the loop."""
        self.run(self.stop_engine())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def kv_events(session: Session) -> list[KvEvent]:
    """Return what was told of blocks."""
    return [reading for reading in session.readings if not isinstance(reading, LoadSnapshot)]


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the files of shared memory that SGLang has made for these processes."""
    mapped = {Path(each.path) for process in processes for each in process.memory_maps()}
    return {path for path in mapped if path.parent == Path("/dev/shm") and path.name.startswith("sglang")}
