"""Whether the library's engine lives: asked now and then, off the event loop. No answer is an answer."""

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from baton.engine_kit.threads import run_in_thread
from baton.engines.trtllm.compat import Library
from baton.engines.trtllm.library_types import Living, Living13
from baton.errors import BatonError, EngineDead, EngineFailed

HEALTH_EVERY_S = 2.0
HEALTH_LIMIT_S = 30.0
SHUTDOWN_S = 60.0

log = logging.getLogger(__name__)


def accepts(engine: Living | None) -> bool:
    """Whether `engine` takes work, as far as this process knows. Never blocks."""
    return engine is not None and engine._executor is not None and not engine._executor.is_shutdown()


def lives(engine: Living, library: Library) -> bool:
    """Ask `engine`. May block."""
    return cast(Living13, engine)._check_health() if library.features.health_check else accepts(engine)


async def watch(engine: Living, library: Library, on_death: Callable[[EngineDead], None]) -> None:
    """Return when `engine` does not live any more, after telling `on_death` once."""
    problem: str | None = None
    while problem is None:
        await asyncio.sleep(HEALTH_EVERY_S)
        try:
            well = await asyncio.wait_for(
                run_in_thread("trtllm-health", lambda: lives(engine, library)), HEALTH_LIMIT_S
            )
            problem = None if well else "it says so itself"
        except TimeoutError:
            problem = f"it does not answer within {HEALTH_LIMIT_S:g} s"
        except Exception as error:  # noqa: BLE001 - what cannot tell whether it lives does not
            problem = repr(error)
    on_death(EngineDead(f"TensorRT-LLM is not healthy: {problem}"))


def meaning(error: Exception, engine: Living | None, library: Library) -> BatonError:
    """Return what an error of the library means: EngineDead is the end for all, anything else harms one request."""
    if isinstance(error, library.request_error):
        return EngineFailed(str(error))
    gone = library.engine_dead_error
    if (gone is not None and isinstance(error, gone)) or not accepts(engine):
        return EngineDead(f"TensorRT-LLM has died: {error!r}")
    return EngineFailed(f"TensorRT-LLM failed the request: {error!r}")


async def shut_down(engine: Living) -> None:
    """End `engine`, off the event loop; one that does not end in time, or fails to, is left."""
    try:
        await asyncio.wait_for(run_in_thread("trtllm-stop", engine.shutdown), SHUTDOWN_S)
    except TimeoutError:
        log.warning("TensorRT-LLM did not end within %g s", SHUTDOWN_S)
    except Exception as error:  # noqa: BLE001 - it is to end, and nobody can do more
        log.warning("TensorRT-LLM ended with an error: %r", error)
