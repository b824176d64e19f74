"""The logs of runs that have ended, beside those of the current one."""

from pathlib import Path

from baton.config.private_files import PRIVATE_FILE
from baton.topology.log_file import log_prefix

PREVIOUS = ".previous"
"""The ending of the logs of the run before the last one at an address."""


def keep_last_run(directory: Path, host: str, port: int) -> None:
    """Move the logs of the last run at this address, of all its processes, over those of the run before it.

    They stay where they are if the last run has left none, as one that was refused. Raises OSError.
    """
    own = list(directory.glob(f"{log_prefix(host, port)}*"))
    logs = [path for path in own if path.name.endswith((".log", ".log.1")) and not path.is_symlink()]
    if not logs:
        return
    for path in own:
        if path.name.endswith((f".log{PREVIOUS}", f".log.1{PREVIOUS}")):
            path.unlink()
    for path in logs:
        path.chmod(PRIVATE_FILE)  # a file of an earlier version may be readable by others
        path.replace(path.with_name(path.name + PREVIOUS))
