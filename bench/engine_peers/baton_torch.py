"""Baton's built-in engine, through the engine port, as in a worker. Variant: the dtype of the weights."""

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from baton.config.engines import TorchOptions
from baton.engines.torch.engine import TorchEngine
from baton.ports.engine import GenerateEngine, Stream, Work
from baton.protocol.commands import Command, Outcome
from baton.protocol.ids import RequestId
from baton.protocol.outputs import TokenDelta
from baton.protocol.requests import Sampling, StopConditions

Row = dict[str, Any]


class EngineDriver:
    """A started engine. Its event loop runs only during a method call, because the benchmark is its only caller."""

    def __init__(self, make: Callable[[], GenerateEngine]) -> None:
        self._loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._names = itertools.count()
        self._engine = self._loop.run(self._start(make))

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[Row]:
        return self._loop.run(self._generate(prompts, new_tokens))

    def execute(self, command: Command) -> Outcome:
        return self._loop.run(self._engine.execute(command))

    def metrics(self) -> str:
        return self._engine.metrics()

    def close(self) -> None:
        self._loop.run(self._engine.stop())
        self._loop.close()

    async def _start(self, make: Callable[[], GenerateEngine]) -> GenerateEngine:
        engine = make()
        await engine.start()
        # A worker publishes the readings; here they are discarded.
        self._readings = asyncio.create_task(drain(engine))
        return engine

    async def _generate(self, prompts: list[list[int]], new_tokens: int) -> list[Row]:
        streams = [self._engine.submit(self._work(prompt, new_tokens)) for prompt in prompts]
        return await asyncio.gather(*(follow(stream) for stream in streams))

    def _work(self, prompt: list[int], new_tokens: int) -> Work:
        return Work(
            request_id=RequestId(f"bench-{next(self._names)}"),
            token_ids=tuple(prompt),
            max_tokens=new_tokens,
            stop=StopConditions(max_tokens=new_tokens, ignore_eos=True),
            sampling=Sampling(temperature=0.0, repetition_penalty=1.0),  # not the default of the demo model
        )


async def drain(engine: GenerateEngine) -> None:
    async for _ in engine.readings():
        pass


async def follow(stream: Stream) -> Row:
    tokens: list[int] = []
    times: list[float] = []
    while outputs := await stream.read():
        now = time.monotonic()
        for output in outputs:
            if isinstance(output, TokenDelta):
                tokens += output.token_ids
                times += [now] * len(output.token_ids)
    return {"times": times, "tokens": tokens}


def options_for(setup: dict[str, Any]) -> TorchOptions:
    block = TorchOptions().block_size
    return TorchOptions(
        device="cpu",
        dtype=setup["variant"],
        threads=setup["threads"],
        context=setup["context"],
        # The last block of each row is partly empty, and the scheduler reserves one for each running row.
        blocks=setup["kv_tokens"] // block + 2 * setup["max_batch"],
        max_running=setup["max_batch"],
    )


def load(setup: dict[str, Any]) -> EngineDriver:
    return EngineDriver(lambda: TorchEngine(options_for(setup), Path(setup["model"]), "bench"))
