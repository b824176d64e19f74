"""Media input: from the media that a request names to what the engine takes, and the prompt that goes with it.

    encoder_result ──► rows of an encode worker (`media_rows.py`), or handles ─┐
    multi_modal_data ──► files fetched ──► rows by this engine                 ├─► LoadedMedia ──► prompt, Work.media
                                       └──► files, for engines that take them ─┘
    KV of a prefill worker ──► items without rows, as the prefill placed them ─┘

Rows stay pinned, and handles claimed, until `LoadedMedia` is closed. `used` confirms to the encode worker that the
engine has read its handles; rows are confirmed when they have been fetched.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec

from baton.errors import BatonError, InvalidRequest, PeerLost, Unsupported
from baton.handlers.client_rows import rows_of
from baton.handlers.media_encoder import MediaEncoder
from baton.handlers.media_rows import RowsInput, wait_for_rows
from baton.handlers.placed_prompt import embeddings, expanded, has_placeholders, place, plain_prompt
from baton.handlers.routing_hashes import with_routing_hashes
from baton.handlers.tickets import EncoderResult, read_encoder_result
from baton.media.embedding_store import Hold
from baton.ports.engine import Capabilities, EngineInfo, Work
from baton.ports.media import MediaLoader
from baton.ports.transfer import Claim, Consumer
from baton.protocol.media import (
    UNFETCHED,
    EmbeddingFile,
    LoadedMediaItem,
    Media,
    MediaFile,
    MediaHandles,
    MediaUrl,
    PlacedItem,
)
from baton.protocol.requests import GenerateRequest
from baton.request.tracker import TrackedRequest

log = logging.getLogger(__name__)

URL_SCHEMES = ("http://", "https://", "data:", "file:")


class LoadedMedia:
    """The media of one request, ready for the engine. As a context manager, it closes them.

    `token_ids` is the prompt that goes with them, None if it is that of the request. `sources` have the memory of rows
    that a client has computed: their bytes count as long as they are referred to.
    """

    def __init__(
        self,
        items: tuple[Media, ...] = (),
        token_ids: tuple[int, ...] | None = None,
        placed: tuple[PlacedItem, ...] = (),
        hold: Hold | None = None,
        claim: Claim | None = None,
        sources: tuple[LoadedMediaItem, ...] = (),
    ) -> None:
        self.items = items
        self.token_ids = token_ids
        self.placed = placed
        self._hold = hold
        self._claim = claim
        self._sources = sources

    async def __aenter__(self) -> "LoadedMedia":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def attach(self, work: Work, tracked: TrackedRequest, admit: Callable[[tuple[int, ...]], Work]) -> Work:
        """Return `work` with these media. A changed prompt is admitted again, by `admit`, and counted as it is now."""
        if self.token_ids is not None:
            work = admit(self.token_ids)
            tracked.prompt_tokens = len(self.token_ids)
        return msgspec.structs.replace(work, media=self.items) if self.items else work

    def used(self) -> None:
        """The engine has read them. Idempotent."""
        if self._claim is not None:
            self._claim.taken()

    def transfer(self) -> "LoadedMedia":
        """Return the same media for a new owner; closing this one has no effect from now on."""
        claim, self._claim = self._claim, None
        hold, self._hold = self._hold, None
        return LoadedMedia(self.items, self.token_ids, self.placed, hold, claim, self._sources)

    async def close(self) -> None:
        """Unpin rows, and give up handles that have not been read. Idempotent."""
        if self._hold is not None:
            self._hold.release()
        if self._claim is not None:
            await self._claim.close()


class MediaInput:
    """Loads media at one worker, in the ways that it has.

    `loader` fetches files; `encoder` encodes them here; `rows` fetches rows, and `handles` claims handles, from encode
    workers.
    """

    def __init__(
        self,
        can: Capabilities,
        info: EngineInfo,
        loader: MediaLoader | None = None,
        encoder: MediaEncoder | None = None,
        rows: RowsInput | None = None,
        handles: Consumer | None = None,
    ) -> None:
        self._can = can
        self._media = info.media
        self._loader = loader
        self._encoder = encoder
        self._rows = rows
        self._handles = handles

    def check(self, request: GenerateRequest) -> None:
        """Refuse media that this worker does not take, before anything is fetched. Raises InvalidRequest."""
        if request.encoder_result is not None:
            if self._rows is None and self._handles is None:
                raise Unsupported("encoder_result: this worker does not take media from encode workers")
            return
        for kind in request.media or ():
            if kind.removesuffix("_url") not in self._modalities() and not self._reads_encoded:
                raise Unsupported(f"multi_modal_data.{kind}: this engine takes {', '.join(self._accepted())} only")
        named_media(request)

    async def load(self, request: GenerateRequest, tracked: TrackedRequest) -> LoadedMedia:
        """Return the media of a request that `check` accepts; the caller closes them.

        Raises Unsupported, InvalidRequest, PeerLost, or the error that the cancel scope fires with.
        """
        if not names_media(request):
            return self._text_only(request)
        if request.encoder_result is not None:
            result = read_encoder_result(request.encoder_result)
            try:
                return await self._encoded(request, result, tracked)
            except PeerLost as error:
                if self._encoder is None:
                    raise
                log.warning("%s media are encoded here instead: %s", tracked.request_id, error.message)
        if self._loader is None:
            raise Unsupported("multi_modal_data: this worker does not fetch media")
        loaded = await tracked.scope.wait(self._loader.load(named_media(request)))
        tracked.timeline.mark("media_fetched", fetched(loaded))
        try:
            return await self._from_loaded(request, loaded, tracked)
        except BaseException:
            self._loader.release(loaded)
            raise

    async def _from_loaded(
        self,
        request: GenerateRequest,
        loaded: tuple[LoadedMediaItem, ...],
        tracked: TrackedRequest,
    ) -> LoadedMedia:
        if self._encoder is not None:
            encoding = self._encoder.encode(loaded, request.token_ids, tracked.trace_headers)
            hold = await wait_for_rows(tracked.scope, encoding)
            tracked.timeline.mark("encoded", {"items": len(loaded)})
            return self._placed(request, hold)
        if any(isinstance(item, EmbeddingFile) for item in loaded):
            return await self._client_rows(request, loaded, tracked)
        files = media_files(loaded)
        if not {file.modality for file in files} <= self._can.modalities:
            raise PeerLost(
                "no encode worker has encoded the media of this request, and this worker does not encode: see the log"
                " of the encode workers, or start this worker with --media-local-encoding auto"
            )
        return self._as_files(request, files)

    async def from_prefill(self, request: GenerateRequest, claim: Claim, tracked: TrackedRequest) -> LoadedMedia:
        """Return the media of a request whose KV comes from a prefill worker: without rows, and nothing is fetched.

        Raises PeerLost, the error of the prefill worker, or the error that the cancel scope fires with.
        """
        if not names_media(request):
            return self._text_only(request)
        placed = await tracked.scope.wait(claim.media())
        if self._media is None or not placed:
            return LoadedMedia()
        token_ids, positions = expanded(request.token_ids, placed, self._media)
        media = embeddings(placed, positions, [None] * len(placed), self._media)
        return LoadedMedia(with_routing_hashes(media, request.image_routing_hashes), token_ids, placed)

    async def close(self) -> None:
        """Close the loader. Idempotent."""
        if self._loader is not None:
            await self._loader.close()

    @property
    def _reads_encoded(self) -> bool:
        return self._loader is not None and (self._rows is not None or self._handles is not None)

    def _modalities(self) -> frozenset[str]:
        """Return the modalities of the files that this worker takes."""
        encoded = self._can.encoded_modalities if self._encoder is not None else frozenset()
        return encoded | (self._can.modalities if self._loader is not None else frozenset({"text"}))

    def _accepted(self) -> list[str]:
        return sorted(self._modalities() | {"text"})

    def _text_only(self, request: GenerateRequest) -> LoadedMedia:
        """Return no media, and the prompt with placeholders that a client has typed as ordinary text."""
        if self._media is None or not has_placeholders(request.token_ids, self._media):
            return LoadedMedia()
        return LoadedMedia(token_ids=expanded(request.token_ids, (), self._media)[0])

    async def _client_rows(
        self, request: GenerateRequest, loaded: tuple[LoadedMediaItem, ...], tracked: TrackedRequest
    ) -> LoadedMedia:
        """Return rows that the client has computed, for an engine that takes rows and encodes nothing here."""
        media = self._media
        files = [item for item in loaded if isinstance(item, EmbeddingFile)]
        if media is None or not self._can.media_embeddings:
            raise Unsupported(f"{files[0].place}: this engine does not take embedding files")
        if len(files) < len(loaded):
            raise Unsupported(f"{files[0].place}: this engine does not take embedding files together with other media")
        rows = [await tracked.scope.wait(asyncio.to_thread(rows_of, file, media)) for file in files]
        placed = place(request, [each.item for each in rows], media)
        token_ids, positions = expanded(request.token_ids, placed, media)
        items = embeddings(placed, positions, [each.data for each in rows], media)
        return LoadedMedia(items, token_ids, placed, sources=loaded)

    def _as_files(self, request: GenerateRequest, files: tuple[MediaFile, ...]) -> LoadedMedia:
        """Return files for an engine that places them itself; placeholders that a client has typed become text."""
        return LoadedMedia(files, self._plain_prompt(request))

    def _plain_prompt(self, request: GenerateRequest) -> tuple[int, ...] | None:
        """Return the prompt without typed placeholders; None if it has none."""
        plain = plain_prompt(request, self._media)
        return None if plain == request.token_ids else plain

    def _placed(self, request: GenerateRequest, hold: Hold) -> LoadedMedia:
        assert self._media is not None  # there would be no rows
        try:
            placed = place(request, hold.items, self._media)
            token_ids, positions = expanded(request.token_ids, placed, self._media)
        except BaseException:
            hold.release()
            raise
        rows = [hold.rows(slot) for slot in hold.slots]
        media = embeddings(placed, positions, rows, self._media)
        return LoadedMedia(with_routing_hashes(media, request.image_routing_hashes), token_ids, placed, hold)

    async def _encoded(self, request: GenerateRequest, result: EncoderResult, tracked: TrackedRequest) -> LoadedMedia:
        if self._rows is not None:
            return self._placed(request, await wait_for_rows(tracked.scope, self._rows.fetch(result, tracked.timeline)))
        if self._handles is None or not self._can.media_handles:
            raise Unsupported("encoder_result: this engine does not read media from encode workers")
        return await self._claim_handles(self._handles, result, self._plain_prompt(request), tracked)

    async def _claim_handles(
        self,
        consumer: Consumer,
        result: EncoderResult,
        token_ids: tuple[int, ...] | None,
        tracked: TrackedRequest,
    ) -> LoadedMedia:
        def lost(error: BatonError) -> None:
            tracked.scope.fire(
                PeerLost(f"the media that an encode worker held for this request are lost: {error.message}")
            )

        tracked.timeline.mark("kv_claimed", {"room": result.ticket.room, "kind": "media"})
        claim = consumer.claim(result.ticket, lambda: None, lost)
        try:
            # Until the claim is accepted, the handles may name memory that has been freed and used again.
            await tracked.scope.wait(claim.claimed())
        except BaseException:
            await claim.close()
            raise
        return LoadedMedia((MediaHandles(params=result.params),), token_ids, claim=claim)


def names_media(request: GenerateRequest) -> bool:
    """Whether the request has media, encoded or not."""
    return request.encoder_result is not None or any((request.media or {}).values())


def named_media(request: GenerateRequest) -> tuple[MediaUrl, ...]:
    """Return the media that `request` names, in its order. Raises InvalidRequest or Unsupported."""
    named: list[MediaUrl] = []
    for kind, items in (request.media or {}).items():
        for number, item in enumerate(items):
            place = f"multi_modal_data.{kind}[{number}]"
            if item.url is None:
                raise Unsupported(f"{place}: media decoded by the frontend are not supported; send a URL")
            url = item.url.removeprefix(UNFETCHED)
            if not url[:8].lower().startswith(URL_SCHEMES):
                raise InvalidRequest(f"{place}: only {', '.join(URL_SCHEMES)} URLs are supported")
            named.append(MediaUrl(modality=kind.removesuffix("_url"), url=url, place=place))
    return tuple(named)


def fetched(loaded: Sequence[LoadedMediaItem]) -> dict[str, object]:
    """Return the detail of a timeline about media files that are here."""
    return {"items": len(loaded), "bytes": sum(memoryview(item.data).nbytes for item in loaded)}


def media_files(loaded: tuple[LoadedMediaItem, ...]) -> tuple[MediaFile, ...]:
    """Return `loaded` for an engine that takes media files only. Raises Unsupported for embedding files."""
    files: list[MediaFile] = []
    for item in loaded:
        if isinstance(item, EmbeddingFile):
            raise Unsupported(f"{item.place}: this engine does not take embedding files")
        files.append(item)
    return tuple(files)
