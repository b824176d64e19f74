"""The exit code of a process: it tells the supervisor whether to restart it."""

import cProfile
import logging
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from baton.errors import BatonError, ConfigError
from baton.status.sd_notify import notify

log = logging.getLogger(__name__)

EXIT_FAILED = 75  # EX_TEMPFAIL: restart


async def exit_code(work: Coroutine[Any, Any, None], profile: Path | None = None) -> int:
    """Do `work` and return 0, or `EXIT_FAILED` if it failed. Raises ConfigError, which a restart does not fix.

    With `profile`, a directory, a profile of the event loop is written there.
    """
    profiler = cProfile.Profile() if profile is not None else None
    if profiler is not None:
        profiler.enable()
    try:
        await work
    except ConfigError:
        raise
    except BatonError as error:
        log.critical("%s: %s", error.code, error.message)
        notify(f"STATUS={error.message}")
        return EXIT_FAILED
    finally:
        if profiler is not None and profile is not None:
            profiler.disable()
            profiler.dump_stats(profile / f"baton-{os.getpid()}.pstats")
    return 0
