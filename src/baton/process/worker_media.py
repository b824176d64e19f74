"""The media of one worker: what its engine can do with them decides how they are loaded.

| engine | files of a request |
|---|---|
| encodes, and takes embeddings | encoded here, through the embedding store, unless `--media-local-encoding never` |
| takes embeddings | rows of encode workers, with `--media-encoders` |
| takes handles | handles of encode workers, with `--media-encoders` |
| takes files | given to the engine |
"""

from typing import TYPE_CHECKING

from baton.config.peer_tls import peer_tls
from baton.handlers.media import MediaInput
from baton.handlers.media_encoder import MediaEncoder
from baton.handlers.media_rows import RowsInput
from baton.media.embedding_store import EmbeddingStore
from baton.ports.engine import EncodeEngine, HandleEngine
from baton.ports.media import MediaLoader
from baton.process.role_context import RoleContext

if TYPE_CHECKING:
    from baton.transfer.room_client import RoomClient


class WorkerMedia:
    """The parts that load media at one worker, and their end."""

    def __init__(
        self,
        media_input: MediaInput,
        loader: MediaLoader | None,
        store: EmbeddingStore | None,
        encoder: MediaEncoder | None,
        consumer: "RoomClient | None",
    ) -> None:
        self.input = media_input
        self.loader = loader
        self.store = store
        self.encoder = encoder
        self.consumer = consumer

    async def close(self) -> None:
        """Close all of them. Idempotent."""
        if self.consumer is not None:
            await self.consumer.close()
        if self.loader is not None:
            await self.loader.close()
        if self.store is not None:
            self.store.close()


def takes_files(context: RoleContext) -> bool:
    """Whether a worker that computes prompts takes media files without an encode worker."""
    can = context.engine.capabilities
    return _encodes_here(context) or bool(can.modalities - {"text"})


def build_media(context: RoleContext, role: str) -> WorkerMedia:
    """Return what loads the media of a worker. Raises ConfigError."""
    encodes = role == "encode" or _encodes_here(context)
    reads_encoded = role != "encode" and context.settings.media.encoders
    if not (encodes or reads_encoded):
        loader = _loader(context) if takes_files(context) else None
        return _assemble(context, loader, None, None, None)
    store = _store(context)
    encoder = _encoder(context, store) if encodes else None
    return _assemble(context, _loader(context), store, encoder, _consumer(context, store) if reads_encoded else None)


def _assemble(
    context: RoleContext,
    loader: MediaLoader | None,
    store: EmbeddingStore | None,
    encoder: MediaEncoder | None,
    consumer: "RoomClient | None",
) -> WorkerMedia:
    can = context.engine.capabilities
    handles = consumer if can.media_handles else None
    media_input = MediaInput(can, context.info, loader, encoder, _rows(consumer, store), handles)
    return WorkerMedia(media_input, loader, store, encoder, consumer)


def _encodes_here(context: RoleContext) -> bool:
    can = context.engine.capabilities
    return can.media_encoding and can.media_embeddings and context.settings.media.local_encoding == "auto"


def _loader(context: RoleContext) -> MediaLoader:
    from baton.media.loader import PolicyLoader  # imports Pillow, which text does not need

    return PolicyLoader(context.settings.media)


def _store(context: RoleContext) -> EmbeddingStore | None:
    """Return the store for the rows of this model; None if its engine holds what it encodes."""
    if context.info.media is None or context.engine.capabilities.media_handles:
        return None
    if isinstance(context.engine, HandleEngine):
        return None
    return EmbeddingStore(context.info.media.shape, context.settings.media.cache_bytes)


def _encoder(context: RoleContext, store: EmbeddingStore | None) -> MediaEncoder | None:
    if store is None or context.info.media is None or not isinstance(context.engine, EncodeEngine):
        return None
    return MediaEncoder(context.engine, store, context.info.media)


def _consumer(context: RoleContext, store: EmbeddingStore | None) -> "RoomClient":
    from baton.transfer.room_client import open_room_client  # imports numpy, which text does not need

    memory = store.memory if store is not None else None
    return open_room_client(context.settings.kv, memory, peer_tls(context.settings.runtime))


def _rows(consumer: "RoomClient | None", store: EmbeddingStore | None) -> RowsInput | None:
    return RowsInput(consumer, store) if consumer is not None and store is not None else None
