"""Started engines that the tests of a class share, in an event loop that outlives them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from baton.ports.engine import GenerateEngine
from baton.testing.bounded import BoundedLoop, eventually
from baton.testing.engine_session import Session
from baton.testing.fakes import running


class SharedEngines:
    """Engines by name. An engine is started for the first test that uses it, and again after a test that failed."""

    def __init__(self) -> None:
        self._loop = BoundedLoop()
        self._started: dict[str, tuple[Session, AsyncExitStack]] = {}

    def run(self, body: Coroutine[Any, Any, None], limit_s: float) -> None:
        """Run a test in the loop of the engines. Raises AssertionError after `limit_s`."""
        self._loop.run(body, limit_s)

    @asynccontextmanager
    async def session(self, name: str, make: Callable[[], GenerateEngine], limit_s: float) -> AsyncIterator[Session]:
        """Yield the started engine `name`. At the end it is idle again, or the test fails."""
        if name not in self._started:
            stack = AsyncExitStack()
            self._started[name] = (await stack.enter_async_context(started(make())), stack)
        session, _ = self._started[name]
        try:
            yield session
            await session.as_at_the_start(limit_s)
        except pytest.skip.Exception:
            raise
        except BaseException:
            await self._stop(name)
            raise

    def close(self, limit_s: float) -> None:
        """Stop every engine and end the loop."""

        async def stop_all() -> None:
            for name in list(self._started):
                await self._stop(name)

        try:
            self._loop.run(stop_all(), limit_s)
        finally:
            self._loop.close()

    async def _stop(self, name: str) -> None:
        _, stack = self._started.pop(name)
        await stack.aclose()


@asynccontextmanager
async def started(engine: GenerateEngine) -> AsyncIterator[Session]:
    """Start `engine` and collect its readings; stop it at the end of the block."""
    async with running(engine) as info:
        session = Session(engine, info)
        listening = asyncio.create_task(session.listen())
        await eventually(lambda: session.used_blocks() is not None)
        yield session
    await listening
