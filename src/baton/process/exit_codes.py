"""How the work of a process ends, as the exit code that tells its supervisor what to do next."""

import cProfile
import logging
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from baton.errors import BatonError, ConfigError
from baton.status.sd_notify import notify

log = logging.getLogger(__name__)

EXIT_FAILED = 75  # EX_TEMPFAIL: start me again


async def exit_code(work: Coroutine[Any, Any, None], profile: Path | None = None) -> int:
    """Do `work` and return 0, or `EXIT_FAILED` if it failed. Raises ConfigError, for a restart would not mend that.

    With `profile`, a directory, a profile of the event loop is left there.
    """
    clock = cProfile.Profile() if profile is not None else None
    if clock is not None:
        clock.enable()
    try:
        await work
    except ConfigError:
        raise
    except BatonError as error:
        log.critical("%s: %s", error.code, error.message)
        notify(f"STATUS={error.message}")
        return EXIT_FAILED
    finally:
        if clock is not None and profile is not None:
            clock.disable()
            clock.dump_stats(profile / f"baton-{os.getpid()}.pstats")
    return 0
