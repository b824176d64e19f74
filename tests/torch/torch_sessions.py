"""A built-in engine on a tiny random model with its readings, for tests of its commands."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from baton.config.engines import ExpertOptions, TorchOptions
from baton.engines.torch.engine import TorchEngine
from baton.ports.engine import EngineInfo, Stream, Work
from baton.protocol.commands import Command, Outcome
from baton.protocol.events import KvCleared, LoadSnapshot, Reading
from baton.protocol.handoff import Handoff
from baton.protocol.ids import RequestId
from baton.protocol.outputs import Finished, TokenDelta
from baton.protocol.requests import Sampling, StopConditions

PROMPT = tuple(range(1, 41))
LONG = 400


class Session:
    """A started engine and its readings."""

    def __init__(self, engine: TorchEngine, info: EngineInfo) -> None:
        self.engine = engine
        self.info = info
        self.readings: list[Reading] = []
        self.listening = asyncio.create_task(self._listen())
        self._numbers = 0

    async def execute(self, command: Command) -> Outcome:
        return await self.engine.execute(command)

    def start(
        self, prompt: tuple[int, ...] = PROMPT, tokens: int = 16, handoff: Handoff | None = None, **sampling: Any
    ) -> tuple[RequestId, Stream]:
        self._numbers += 1
        work = Work(
            request_id=RequestId(f"r{self._numbers}"),
            token_ids=prompt,
            max_tokens=tokens,
            stop=StopConditions(ignore_eos=True),
            sampling=Sampling(**(sampling or {"temperature": 0.0})),
            handoff=handoff,
        )
        return work.request_id, self.engine.submit(work)

    async def generate(self, prompt: tuple[int, ...] = PROMPT, tokens: int = 16) -> list[int]:
        return (await read(self.start(prompt, tokens)[1]))[0]

    async def cached(self, prompt: tuple[int, ...] = PROMPT) -> int:
        """How many tokens of `prompt` are cached."""
        _, end = await read(self.start(prompt, 1)[1])
        assert end is not None
        return end.cached_tokens or 0

    def load(self) -> LoadSnapshot | None:
        """The last load reading."""
        return next((reading for reading in reversed(self.readings) if isinstance(reading, LoadSnapshot)), None)

    def clears(self) -> int:
        return sum(isinstance(reading, KvCleared) for reading in self.readings)

    async def _listen(self) -> None:
        async for reading in self.engine.readings():
            self.readings.append(reading)


async def read(stream: Stream, at_least: int | None = None) -> tuple[list[int], Finished | None]:
    """Read to the end, or until there are so many tokens; return them, and the end."""
    tokens: list[int] = []
    end: Finished | None = None
    while outputs := await stream.read():
        for output in outputs:
            if isinstance(output, TokenDelta):
                tokens += output.token_ids
            elif isinstance(output, Finished):
                end = output
        if at_least is not None and len(tokens) >= at_least:
            break
    return tokens, end


@asynccontextmanager
async def session(
    directory: Path,
    spill_dir: Path | None = None,
    exports_kv: bool = False,
    experts: ExpertOptions | None = None,
    **options: Any,
) -> AsyncIterator[Session]:
    """Run an engine until the end of the block."""
    settings: dict[str, Any] = {"dtype": "float32", "threads": 1, "blocks": 256, "context": 1024, "max_running": 4}
    spill = str(spill_dir or directory / "spill")
    engine = TorchEngine(
        TorchOptions(**{**settings, "spill_dir": spill, **options}),
        directory,
        "tiny",
        exports_kv=exports_kv,
        experts=experts,
    )
    here = Session(engine, await engine.start())
    try:
        yield here
    finally:
        await engine.stop()
        await here.listening


def trace_names(path: Path) -> set[str]:
    """Return the names of all events in a profile."""
    return {str(event.get("name")) for event in json.loads(path.read_text())["traceEvents"]}


async def fresh_answer(directory: Path, **options: Any) -> list[int]:
    """Return what a new engine on the model in `directory` generates."""
    async with session(directory, **options) as here:
        return await here.generate()
