"""The built-in engine of a vision-language model that encodes the media of its requests itself."""

from pathlib import Path

import msgspec

from baton.config.engines import ExpertOptions, TorchOptions
from baton.engines.torch.engine import TorchEngine
from baton.engines.torch.vision.calls import EncodeCalls
from baton.engines.torch.vision.encoder import VisionEncoder
from baton.ports.engine import Capabilities, Encoded, EncodeWork, EngineInfo, Progress
from baton.protocol.ids import RequestId
from baton.status.progress_line import ProgressLine


class TorchVisionLanguageEngine(TorchEngine):
    """A TorchEngine that is an EncodeEngine too: it has the vision tower of its model, on a thread of its own."""

    def __init__(
        self,
        options: TorchOptions,
        directory: Path,
        name: str,
        exports_kv: bool = False,
        experts: ExpertOptions | None = None,
    ) -> None:
        """Read the configuration. Raises ConfigError if the model has no supported tower."""
        super().__init__(options, directory, name, exports_kv, experts)
        self._encoder = VisionEncoder(options, directory)
        self._calls = EncodeCalls(self._encoder)

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        return msgspec.structs.replace(
            super().capabilities, media_encoding=True, encoded_modalities=self._encoder.modalities
        )

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        info = await super().start()
        with ProgressLine(f"loading the vision tower of {info.model_name}") as line:
            await self._encoder.start(line.report)
        return info

    async def encode(self, work: EncodeWork) -> Encoded:
        """See `EncodeEngine.encode`."""
        return await self._calls.encode(work)

    async def abort(self, request_id: RequestId) -> None:
        """See `AbortableEngine.abort`."""
        await self._calls.abort(request_id)
        await super().abort(request_id)

    def progress(self) -> Progress:
        """See `Engine.progress`."""
        language = super().progress()
        return Progress(language.steps + self._encoder.steps, language.running + len(self._calls), language.waiting)

    async def stop(self) -> None:
        """See `Engine.stop`."""
        await self._encoder.stop()
        await super().stop()
