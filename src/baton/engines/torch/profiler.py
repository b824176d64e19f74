"""One profile of the engine's thread, in the format of Chrome's and Perfetto's trace viewers."""

import os
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from baton.errors import EngineFailed, InvalidRequest


class StepProfiler:
    """Records from its construction until `finish` or `discard`. All of it happens on one thread."""

    def __init__(self, directory: str, steps: int | None) -> None:
        """End after `steps` steps, if given. Raises InvalidRequest if nothing can be written to `directory`."""
        self.path = _new_file(Path(directory).expanduser())
        self._left = steps
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # With a schedule torch marks every step; without, the native step would leave no trace.
        self._profile = profile(activities=activities, schedule=lambda _: ProfilerAction.RECORD)
        try:
            self._profile.start()
        except RuntimeError as error:
            self.path.unlink(missing_ok=True)
            raise EngineFailed(f"the profiler cannot start: {error}") from error

    def step(self) -> bool:
        """Mark the end of a step; return whether it was the last."""
        self._profile.step()
        if self._left is None:
            return False
        self._left -= 1
        return self._left <= 0

    def finish(self) -> str:
        """Write the profile and return its path."""
        try:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self.path))
        except (OSError, RuntimeError) as error:
            raise EngineFailed(f"the profile cannot be written: {error}") from error
        return str(self.path)

    def discard(self) -> None:
        """Stop without writing anything."""
        self._profile.stop()
        self.path.unlink(missing_ok=True)


def _new_file(directory: Path) -> Path:
    """Create an empty file with a new name, so that an unusable directory is reported before the profile starts."""
    stem = f"baton-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            path = directory / f"{stem}-{number}.trace.json"
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise InvalidRequest(f"directory: {error}") from None
    raise InvalidRequest(f"directory: {directory} has too many profiles of this second")
