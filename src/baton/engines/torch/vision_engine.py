"""The encode port over `vision/encoder.py`: an engine of encode workers. Of a model it loads the vision tower only."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

from baton.config.engines import TorchOptions
from baton.engine_kit.load_readings import load_readings
from baton.engines.torch.vision.calls import EncodeCalls
from baton.engines.torch.vision.encoder import AHEAD, VisionEncoder
from baton.errors import Unsupported
from baton.models.directory import read_config
from baton.ports.engine import Capabilities, Encoded, EncodeWork, EngineInfo, Progress
from baton.protocol.commands import Command, Outcome
from baton.protocol.events import Reading
from baton.protocol.ids import RequestId
from baton.status.progress_line import ProgressLine


class TorchVisionEngine:
    """An EncodeEngine (see `ports/engine.py`) that returns rows, for the model in `directory`."""

    def __init__(self, options: TorchOptions, directory: Path, name: str) -> None:
        """Read the configuration. Raises ConfigError if the model has no supported vision tower."""
        self._directory = directory
        self._name = name
        self._encoder = VisionEncoder(options, directory)
        self._calls = EncodeCalls(self._encoder)
        self._stopped = asyncio.Event()

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        return Capabilities(generate=False, media_encoding=True, encoded_modalities=self._encoder.modalities)

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        config = read_config(self._directory)
        with ProgressLine(f"loading the vision tower of {self._name}") as line:
            media = await self._encoder.start(line.report)
        return EngineInfo(
            model_name=self._name,
            model_dir=str(self._directory),
            context_length=config.max_position_embeddings or 1,
            block_size=1,
            total_blocks=1,
            max_running=AHEAD,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            media=media,
        )

    async def encode(self, work: EncodeWork) -> Encoded:
        """See `EncodeEngine.encode`."""
        return await self._calls.encode(work)

    async def abort(self, request_id: RequestId) -> None:
        """See `AbortableEngine.abort`."""
        await self._calls.abort(request_id)

    async def execute(self, command: Command) -> Outcome:
        """See `Engine.execute`."""
        raise Unsupported(f"the vision encoder does not execute {command.__struct_config__.tag}")

    def metrics(self) -> str:
        """See `Engine.metrics`."""
        return ""

    def progress(self) -> Progress:
        """See `Engine.progress`."""
        running = min(len(self._calls), self._encoder.running)
        return Progress(self._encoder.steps, running, len(self._calls) - running)

    def readings(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`."""
        return load_readings(self.progress, self._stopped)

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._stopped.set()
        await self._encoder.stop()
