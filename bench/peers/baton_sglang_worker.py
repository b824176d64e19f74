"""A Baton worker with the request path of the SGLang adapter, on the same double of SGLang as the reference worker.

Settings come from the environment (`BATON_*`), as for any worker.
"""

import argparse
import asyncio
import os
from collections.abc import AsyncGenerator

import msgspec
import uvloop

from baton.config.directories import profile_directory
from baton.config.load import load
from baton.config.settings import Settings
from baton.engine_kit.output_stream import OutputStream
from baton.engines.sglang.compat import Dialect
from baton.engines.sglang.params import Setting
from baton.engines.sglang.requests import Requests
from baton.errors import EngineDead, Unsupported
from baton.ports.engine import Capabilities, EngineInfo, Progress, Work
from baton.process.exit_codes import exit_code
from baton.protocol.commands import Command, Outcome
from baton.protocol.events import Reading
from baton.protocol.ids import RequestId
from baton.runtimes.dynamo.environment import environment
from bench.peers.fake_sglang import Engine as Double
from bench.peers.fake_sglang import Request


class SglangOnDouble:
    """A GenerateEngine (see `ports/engine.py`): the request path of the SGLang adapter."""

    def __init__(self, model_dir: str, pace_s: float) -> None:
        self._model_dir = model_dir
        self._pace_s = pace_s
        self._double: Double | None = None
        self._requests: Requests | None = None
        self._stopped = asyncio.Event()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(max_choices=16)

    async def start(self) -> EngineInfo:
        self._double = Double(self._pace_s)
        setting = Setting(dialect=Dialect(version="0.5.23"))
        self._requests = Requests(self._double.tokenizer_manager, Request, setting)  # type: ignore[arg-type]
        return EngineInfo(
            model_name="echo",
            model_dir=self._model_dir,
            context_length=1_000_000,
            block_size=16,
            total_blocks=100_000,
            max_running=4096,
        )

    def submit(self, work: Work) -> OutputStream:
        assert self._requests is not None
        return self._requests.submit(work)

    async def abort(self, request_id: RequestId) -> None:
        assert self._requests is not None
        await self._requests.abort(request_id)

    async def execute(self, command: Command) -> Outcome:
        raise Unsupported("the double executes no commands")

    async def readings(self) -> AsyncGenerator[Reading, None]:
        await self._stopped.wait()
        nothing: tuple[Reading, ...] = ()
        for reading in nothing:
            yield reading

    def metrics(self) -> str:
        return ""

    def progress(self) -> Progress:
        assert self._requests is not None
        return Progress(self._requests.steps, self._requests.running, self._requests.waiting)

    async def stop(self) -> None:
        self._stopped.set()
        if self._requests is not None:
            await self._requests.close(EngineDead("the engine has stopped"))
        if self._double is not None:
            await self._double.tokenizer_manager.close()


async def run(settings: Settings, engine: SglangOnDouble) -> None:
    from baton.process.signals import stop_on_signals
    from baton.process.worker import Worker
    from baton.runtimes.dynamo.runtime import DynamoRuntime

    runtime = DynamoRuntime(settings.runtime, publishes_metrics=False, reader_stall_timeout_s=60.0, cancel_grace_s=11.0)
    worker = Worker(settings, engine, runtime)
    await exit_code(
        worker.run(stop_on_signals(drain_timeout_s=settings.drain_timeout_s), lambda: None), profile_directory(settings)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--pace-ms", type=float, default=0.0)
    options = parser.parse_args()
    settings = msgspec.structs.replace(load({}, os.environ, None), engine="sglang")
    os.environ.update(environment(settings.runtime))  # the runtime reads it on import
    uvloop.run(run(settings, SglangOnDouble(options.model_dir, options.pace_ms / 1000)))


if __name__ == "__main__":
    main()
