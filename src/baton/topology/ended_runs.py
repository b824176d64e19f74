"""The logs of runs that have ended, beside those of the current one."""

from collections import defaultdict
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from baton.config.private_files import PRIVATE_FILE
from baton.topology.log_file import LOG_NAME, log_prefix

MAX_ADDRESSES = 20
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


def remove_old_logs(directory: Path, ports: Set[int]) -> None:
    """Remove the logs of all addresses but those that have been written last, and those with `ports`.

    With --port 0 each run has an address of its own. Other runs may move their logs meanwhile.
    """
    by_address: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for path in directory.glob("*.log*"):
        match = LOG_NAME.fullmatch(path.name.removesuffix(PREVIOUS).removesuffix(".1"))
        if match and int(match["port"]) not in ports:
            by_address[match["host"], match["port"]].append(path)
    oldest_first = sorted(by_address.values(), key=lambda paths: max(map(_written_at, paths)))
    for path in (path for paths in oldest_first[:-MAX_ADDRESSES] for path in paths):
        with suppress(OSError):
            path.unlink()


def _written_at(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0
