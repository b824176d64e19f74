"""The library's engine or encoder from its construction to its shutdown: health checks, and errors by what they end.

Its calls block, so each runs on a thread.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import msgspec

from baton.engine_kit.threads import run_in_thread
from baton.engines.trtllm.compat import Library, load
from baton.engines.trtllm.library_types import LibraryEngine, LibraryEngine13
from baton.errors import BatonError, EngineDead, EngineFailed

log = logging.getLogger(__name__)

E = TypeVar("E", bound=LibraryEngine)


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the library's calls, and the interval of health checks."""

    first_token_s: float = 120.0
    abort_s: float = 5.0
    health_interval_s: float = 2.0
    health_timeout_s: float = 30.0
    shutdown_s: float = 60.0


class Lifecycle(Generic[E]):
    """One engine or encoder of the library. `on_end` is called with the error that ended it; the first error stays."""

    def __init__(self, timeouts: Timeouts, on_end: Callable[[BatonError], None]) -> None:
        self.error: BatonError | None = None
        self._timeouts = timeouts
        self._on_end = on_end
        self._engine: E | None = None
        self._health_checks: asyncio.Task[None] | None = None
        self._stopping = asyncio.Lock()

    async def build(self, construct: Callable[[], E]) -> E:
        """Return what `construct` returns; it runs on a thread. Raises its error, or EngineDead after `stop`."""
        return await run_in_thread("trtllm-start", lambda: self._construct(construct))

    def start_health_checks(self, engine: E, library: Library) -> None:
        """Check the health of `engine` until it ends. Raises EngineDead after `stop`."""
        if self.error is not None:
            raise self.error
        self._health_checks = asyncio.create_task(self._check_health(engine, library), name="trtllm-health")

    def end(self, error: BatonError) -> None:
        """End everything with `error`, or with the first one."""
        self.error = self.error or error
        self._on_end(self.error)

    def translate(self, error: Exception, engine: E, library: Library) -> BatonError:
        """Return what an error of the library means. One that ends the engine ends it for every request."""
        meaning = translate(error, engine, library)
        if isinstance(meaning, EngineDead) and self.error is None:
            self.end(meaning)
        if self.error is not None and not isinstance(error, library.request_error):
            return self.error
        return meaning

    async def stop(self) -> None:
        """End everything and shut the engine down. Idempotent."""
        self.end(EngineDead("the engine has stopped"))
        async with self._stopping:
            checks, self._health_checks = self._health_checks, None
            if checks is not None:
                checks.cancel()
                await asyncio.wait([checks])
            engine, self._engine = self._engine, None
            if engine is not None:
                await self._shut_down(engine)

    def _construct(self, construct: Callable[[], E]) -> E:
        """On a thread: `stop` may have been called meanwhile, and would not see this engine."""
        engine = construct()
        self._engine = engine
        if self.error is not None:
            engine.shutdown()
            raise self.error
        return engine

    async def _check_health(self, engine: E, library: Library) -> None:
        problem: str | None = None
        while problem is None:
            await asyncio.sleep(self._timeouts.health_interval_s)
            problem = await self._health_problem(engine, library)
        self.end(EngineDead(f"TensorRT-LLM is unhealthy: {problem}"))

    async def _health_problem(self, engine: E, library: Library) -> str | None:
        timeout_s = self._timeouts.health_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                healthy = await run_in_thread("trtllm-health", lambda: is_healthy(engine, library))
        except TimeoutError:
            return f"its health check has not returned within {timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - a health check that fails is a failed health check
            return repr(error)
        return None if healthy else "its health check failed"

    async def _shut_down(self, engine: E) -> None:
        timeout_s = self._timeouts.shutdown_s
        try:
            async with asyncio.timeout(timeout_s):
                await run_in_thread("trtllm-stop", engine.shutdown)
        except TimeoutError:
            log.warning("TensorRT-LLM did not shut down within %g s", timeout_s)
        except Exception as error:  # noqa: BLE001 - nothing more can be done to end it
            log.warning("TensorRT-LLM shut down with an error: %r", error)


async def load_library(library: Library | None) -> Library:
    """Return `library`, or the installed one, imported on a thread. Raises ConfigError."""
    return library if library is not None else await run_in_thread("trtllm-import", load)


def translate(error: Exception, engine: LibraryEngine, library: Library) -> BatonError:
    """Return what an error of the library means: EngineDead ends the engine, any other error one request."""
    if isinstance(error, library.request_error):
        return EngineFailed(str(error))
    dead_error = library.engine_dead_error
    if (dead_error is not None and isinstance(error, dead_error)) or not accepts(engine):
        return EngineDead(f"TensorRT-LLM has died: {error!r}")
    return EngineFailed(f"TensorRT-LLM failed the request: {error!r}")


def accepts(engine: LibraryEngine) -> bool:
    """Whether `engine` accepts requests, by the state in this process. Never blocks."""
    return engine._executor is not None and not engine._executor.is_shutdown()


def is_healthy(engine: LibraryEngine, library: Library) -> bool:
    """Run the library's health check, if it has one. May block."""
    return cast(LibraryEngine13, engine)._check_health() if library.features.health_check else accepts(engine)
