"""Fakes for tests of the code around an engine: an engine that plays a script, and an observer that keeps records."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

from baton.engine_kit.output_stream import OutputStream
from baton.errors import BatonError, Cancelled, EngineDead, Unsupported
from baton.ports.engine import Capabilities, Engine, EngineInfo, Progress, Work
from baton.ports.observer import RequestRecord
from baton.protocol.commands import Command, Outcome
from baton.protocol.events import Reading
from baton.protocol.ids import RequestId
from baton.protocol.outputs import (
    Finished,
    HandoffReady,
    KvComputed,
    KvWanted,
    Output,
    PromptCached,
    PromptScored,
    TokenDelta,
)

Step = Output | BatonError | asyncio.Event | float
Script = Sequence[Step]
ControlStep = Outcome | Exception | asyncio.Event | float

SCRIPTED_INFO = EngineInfo(
    model_name="scripted",
    model_dir="",
    context_length=1024,
    block_size=16,
    total_blocks=1024,
    max_running=64,
    eos_token_ids=(257,),
)


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[EngineInfo]:
    """Start `engine`, and stop it at the end of the block."""
    try:
        yield await engine.start()
    finally:
        await engine.stop()


class ScriptedEngine:
    """An Engine (see `ports/engine.py`) that plays one script for each request, the last one again and again.

    A step of a script is an output to write, an error that ends the stream, an event to wait for, or a pause in
    seconds. A script that ends without a Finished leaves its request running. An error in place of a script is raised
    by `submit`. What was submitted, received, aborted and commanded is kept in order.

    `control_script` is for all commands together: each takes steps from it up to an outcome or an error.
    """

    def __init__(
        self,
        *scripts: Script | BatonError,
        capabilities: Capabilities | None = None,
        info: EngineInfo = SCRIPTED_INFO,
        start_error: BatonError | None = None,
        abort_takes_s: float = 0.0,
        control: Sequence[ControlStep] = (),
    ) -> None:
        self.scripts = list(scripts) or [()]
        self.submitted: list[Work] = []
        self.aborted: list[RequestId] = []
        self.received_ids: list[RequestId] = []
        self.commands: list[Command] = []
        self.control_script = list(control)
        self.readings_to_give: list[Reading] = []
        self._capabilities = capabilities or Capabilities()
        self._info = info
        self._start_error = start_error
        self._abort_takes_s = abort_takes_s
        self._steps = 0
        self._open: dict[RequestId, tuple[OutputStream, asyncio.Task[None]]] = {}
        self._stopped = asyncio.Event()

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        return self._capabilities

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        if self._start_error is not None:
            raise self._start_error
        return self._info

    def submit(self, work: Work) -> OutputStream:
        """See `GenerateEngine.submit`."""
        if self._stopped.is_set():
            raise EngineDead("the engine has stopped")
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        if isinstance(script, BatonError):
            raise script
        self.submitted.append(work)
        stream = OutputStream(work.sampling.n or 1)
        self._open[work.request_id] = (stream, asyncio.create_task(self._play(script, stream, work.request_id)))
        return stream

    async def abort(self, request_id: RequestId) -> None:
        """See `AbortableEngine.abort`."""
        self.aborted.append(request_id)
        await asyncio.sleep(self._abort_takes_s)
        self._end(request_id, Cancelled("aborted"))

    def received(self, request_id: RequestId) -> None:
        """See `KvImportEngine.received`."""
        self.received_ids.append(request_id)

    async def readings(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`."""
        for reading in self.readings_to_give:
            yield reading
        await self._stopped.wait()

    async def execute(self, command: Command) -> Outcome:
        """See `Engine.execute`."""
        self.commands.append(command)
        while self.control_script:
            match self.control_script.pop(0):
                case Outcome() as outcome:
                    return outcome
                case Exception() as error:
                    raise error
                case asyncio.Event() as event:
                    await event.wait()
                case pause_s:
                    await asyncio.sleep(pause_s)
        raise Unsupported("the scripted engine has nothing to control")

    def metrics(self) -> str:
        """See `Engine.metrics`."""
        return ""

    def progress(self) -> Progress:
        """See `Engine.progress`."""
        return Progress(self._steps, len(self._open), 0)

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._stopped.set()
        for request_id in tuple(self._open):
            self._end(request_id, EngineDead("the engine has stopped"))

    async def _play(self, script: Script, stream: OutputStream, request_id: RequestId) -> None:
        for step in script:
            self._steps += 1
            match step:
                case BatonError():
                    stream.fail(step)
                case asyncio.Event():
                    await step.wait()
                case float() | int():
                    await asyncio.sleep(step)
                case output:
                    _write(output, stream)
        if stream.ended:
            self._open.pop(request_id, None)

    def _end(self, request_id: RequestId, error: BatonError) -> None:
        if found := self._open.pop(request_id, None):
            stream, task = found
            task.cancel()
            stream.fail(error)


class RecordingObserver:
    """An Observer (see `ports/observer.py`) that keeps every record."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def finished(self, record: RequestRecord) -> None:
        """See `Observer.finished`."""
        self.records.append(record)


def _write(output: Output, stream: OutputStream) -> None:
    match output:
        case TokenDelta():
            stream.push(list(output.token_ids), output.index, output.logprobs)
        case PromptCached():
            stream.cached(output.tokens)
        case PromptScored():
            stream.scored(output.logprobs)
        case Finished():
            stream.finish(output.reason, output.index, output.stop_reason, output.cached_tokens)
        case HandoffReady():
            stream.hand_off(output.params)
        case KvComputed():
            stream.computed(output)
        case KvWanted():
            stream.want(output)
