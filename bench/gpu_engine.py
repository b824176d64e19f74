"""The built-in engine on a GPU, driven through its port as a worker does, for `bench.gpu`."""

import asyncio
import gc
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from baton.config.engines import TorchOptions
from baton.engines.torch.engine import TorchEngine
from baton.ports.engine import Work
from baton.protocol.ids import RequestId
from baton.protocol.outputs import TokenDelta
from baton.protocol.requests import Sampling, StopConditions
from bench.gpu_loads import Load

COLLECT_S = 0.5


class EngineRun:
    """A started engine and its event loop."""

    def __init__(self, directory: Path, name: str) -> None:
        self._loop = asyncio.Runner()
        self._names = itertools.count()
        self._streamed = False
        began = time.monotonic()
        self._engine = TorchEngine(TorchOptions(device="cuda", context=32768), directory, name)
        self._readings = self._loop.run(self._start())
        self.ready_s = time.monotonic() - began

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self._loop.run(self._engine.stop())
        self._loop.close()
        del self._engine, self._readings
        gc.collect()
        torch.cuda.empty_cache()

    def streamed(self, streamed: bool) -> None:
        """Read every token when it comes, or the tokens of answers together."""
        self._streamed = streamed

    def run(self, loads: Sequence[Load], temperature: float = 0.0) -> float:
        """Answer all requests at once; return the seconds it took."""
        return self._loop.run(self._run(loads, temperature))

    def kernel_times(self, loads: Sequence[Load]) -> dict[str, float]:
        """Return the GPU's milliseconds by kernel for a batch, the longest first."""
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            self.run(loads)
            torch.cuda.synchronize()
        rows = [(one.key, one.self_device_time_total / 1e3) for one in recorded.key_averages()]
        return dict(sorted(rows, key=lambda row: -row[1])[:14])

    async def _start(self) -> "asyncio.Task[None]":
        await self._engine.start()
        return asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        async for _ in self._engine.readings():
            pass

    async def _run(self, loads: Sequence[Load], temperature: float) -> float:
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for load in loads:
                group.create_task(self._answer(load, temperature))
        return time.monotonic() - began

    async def _answer(self, load: Load, temperature: float) -> None:
        work = Work(
            request_id=RequestId(f"bench-{next(self._names)}"),
            token_ids=load.prompt,
            max_tokens=load.tokens,
            stop=StopConditions(ignore_eos=True),
            sampling=Sampling(temperature=temperature),
        )
        stream = self._engine.submit(work)
        found = 0
        # Not streamed, tokens are read some times a second and merged, as in a request for a whole answer.
        delay = 0.0 if self._streamed else COLLECT_S
        clock = asyncio.get_running_loop().time
        while outputs := await stream.read(clock() + delay):
            found += sum(len(output.token_ids) for output in outputs if isinstance(output, TokenDelta))
        if found != load.tokens:
            raise RuntimeError(f"{found} tokens instead of {load.tokens}")
