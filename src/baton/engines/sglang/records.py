"""Profiles and expert-distribution records of SGLang."""

from pathlib import Path

from baton.config.environment import expert_record_directory
from baton.engines.sglang.sglang_types import Manager
from baton.errors import EngineFailed, InvalidRequest
from baton.protocol.commands import (
    DumpExpertRecord,
    Outcome,
    StartExpertRecord,
    StartProfile,
    StopExpertRecord,
    StopProfile,
)


class Records:
    """Starts, stops and writes records of one engine."""

    def __init__(self, manager: Manager, device: str) -> None:
        self._manager = manager
        self._activities = ["CPU"] if device == "cpu" else ["CPU", "GPU"]
        self._profile: str | None = None

    async def execute(
        self, command: StartProfile | StopProfile | StartExpertRecord | StopExpertRecord | DumpExpertRecord
    ) -> Outcome:
        """See `Engine.execute`."""
        match command:
            case StartProfile():
                return await self._start_profile(_absolute(command.directory), command.steps)
            case StopProfile():
                return await self._stop_profile()
            case StartExpertRecord():
                await self._manager.start_expert_distribution_record()
                return Outcome(message="recording")
            case StopExpertRecord():
                await self._manager.stop_expert_distribution_record()
                return Outcome(message="stopped recording")
            case DumpExpertRecord():
                return await self._dump()

    async def _start_profile(self, directory: str, steps: int | None) -> Outcome:
        from sglang.srt.managers.io_struct import ProfileReq

        request = ProfileReq(output_dir=directory, num_steps=steps, activities=self._activities)
        try:
            await self._manager.start_profile(request)
        except RuntimeError as error:
            raise InvalidRequest(str(error)) from error
        self._profile = directory
        return Outcome(message="recording", path=directory)

    async def _stop_profile(self) -> Outcome:
        try:
            await self._manager.stop_profile()
        except RuntimeError as error:
            raise InvalidRequest(str(error)) from error
        return Outcome(message="written", path=self._profile)

    async def _dump(self) -> Outcome:
        before = _expert_records()
        await self._manager.dump_expert_distribution_record()
        written = sorted(_expert_records() - before)
        if not written:
            raise EngineFailed(f"SGLang wrote no record to {expert_record_directory()}")
        return Outcome(message="written", path=str(written[-1]))


def _expert_records() -> set[Path]:
    return set(expert_record_directory().glob("expert_distribution_recorder_*.pt"))


def _absolute(directory: str) -> str:
    return str(Path(directory).expanduser().absolute())
