"""Processes with one engine each, and how a test talks to them."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil

PEER = Path(__file__).parent / "peer.py"
START_S = 600.0  # two start at once, on a machine that may be busy


class Peer:
    """A process that runs `peer.py`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.place: dict[str, Any] = {}
        self.answers: list[dict[str, Any]] = []
        self._news = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, model: Path, mode: str, *args: str) -> "Peer":
        """Start one and wait until its engine runs."""
        peer = cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, str(PEER), str(model), mode, *args),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join([str(PEER.parents[2]), os.environ.get("PYTHONPATH", "")])},
            )
        )
        peer.place = await peer.answer("port", limit_s=START_S)
        return peer

    def order(self, **order: object) -> None:
        """Ask for something."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")

    async def answer(self, key: str, value: object = None, limit_s: float = 60.0) -> dict[str, Any]:
        """Wait for an answer that has `key`, and there `value` if one is given."""

        def found() -> dict[str, Any] | None:
            return next((a for a in self.answers if key in a and value in (None, a[key])), None)

        async with asyncio.timeout(limit_s), self._news:
            await self._news.wait_for(lambda: found() is not None or self._reading.done())
        answer = found()
        assert answer is not None, f"the peer ended; it said {self.answers}"
        self.answers.remove(answer)
        return answer

    def family(self) -> list[psutil.Process]:
        """Return the process, and those that it has started."""
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]

    async def stop(self) -> None:
        """Ask it to end, and wait."""
        self.order(do="stop")
        await asyncio.wait_for(self.process.wait(), 120)

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            if line.startswith(b"@"):
                async with self._news:
                    self.answers.append(json.loads(line[1:]))
                    self._news.notify_all()
        async with self._news:
            self._news.notify_all()
