"""Media input: the media of a request are fetched here, or were encoded by an encode worker that holds them.

Encoded media are claimed before the engine gets their handles. The claim confirms to the encode worker that they have
been read, or gives them up.
"""

from types import TracebackType

import msgspec

from baton.errors import BatonError, InvalidRequest, PeerLost, Unsupported
from baton.handlers.tickets import encoder_ticket
from baton.ports.engine import Capabilities, Work
from baton.ports.media import MediaLoader
from baton.ports.transfer import Claim, Consumer
from baton.protocol.media import EmbeddingFile, LoadedMediaItem, Media, MediaFile, MediaHandles, MediaUrl
from baton.protocol.requests import GenerateRequest
from baton.request.tracker import TrackedRequest

URL_SCHEMES = ("http://", "https://", "data:", "file:")


class LoadedMedia:
    """The media of one request, ready for the engine. As a context manager, it closes them."""

    def __init__(self, items: tuple[Media, ...] = (), claim: Claim | None = None) -> None:
        self.items = items
        self._claim = claim

    async def __aenter__(self) -> "LoadedMedia":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def attach(self, work: Work) -> Work:
        """Return `work` with these media."""
        return msgspec.structs.replace(work, media=self.items) if self.items else work

    def used(self) -> None:
        """The engine has read them. Idempotent."""
        if self._claim is not None:
            self._claim.taken()

    def transfer(self) -> "LoadedMedia":
        """Return the same media for a new owner; closing this one has no effect from now on."""
        claim, self._claim = self._claim, None
        return LoadedMedia(self.items, claim)

    async def close(self) -> None:
        """Give up what has not been read. Idempotent."""
        if self._claim is not None:
            await self._claim.close()


class MediaInput:
    """Loads media at one worker: `loader` fetches those that a request names, `consumer` claims encoded ones."""

    def __init__(self, loader: MediaLoader | None = None, consumer: Consumer | None = None) -> None:
        self._loader = loader
        self._consumer = consumer

    async def load(self, request: GenerateRequest, tracked: TrackedRequest, can: Capabilities) -> LoadedMedia:
        """Return the media of a request that has passed admission; the caller closes them.

        Raises Unsupported, InvalidRequest, PeerLost, or the error that the cancel scope fires with.
        """
        if request.encoder_result is not None:
            return await self._claim(request.encoder_result, tracked, can)
        if not request.media:
            return LoadedMedia()
        if self._loader is None:
            raise Unsupported("multi_modal_data: this worker does not fetch media")
        return LoadedMedia(media_files(await tracked.scope.wait(self._loader.load(named_media(request)))))

    async def close(self) -> None:
        """Close the loader. Idempotent."""
        if self._loader is not None:
            await self._loader.close()

    async def _claim(self, result: dict[str, object], tracked: TrackedRequest, can: Capabilities) -> LoadedMedia:
        if not can.media_handles or self._consumer is None:
            raise Unsupported("encoder_result: this engine does not read media from encode workers")
        ticket, params = encoder_ticket(result)

        def lost(error: BatonError) -> None:
            tracked.scope.fire(
                PeerLost(f"the media that an encode worker held for this request are lost: {error.message}")
            )

        claim = self._consumer.claim(ticket, lambda: None, lost)
        try:
            # Until the claim is accepted, the handles may name memory that has been freed and used again.
            await tracked.scope.wait(claim.claimed())
        except BaseException:
            await claim.close()
            raise
        return LoadedMedia((MediaHandles(params=params),), claim)


def named_media(request: GenerateRequest) -> tuple[MediaUrl, ...]:
    """Return the media that `request` names, in its order. Raises InvalidRequest or Unsupported."""
    named: list[MediaUrl] = []
    for kind, items in (request.media or {}).items():
        for number, item in enumerate(items):
            place = f"multi_modal_data.{kind}[{number}]"
            if item.url is None:
                raise Unsupported(f"{place}: media decoded by the frontend are not supported; send a URL")
            if not item.url[:8].lower().startswith(URL_SCHEMES):
                raise InvalidRequest(f"{place}: only {', '.join(URL_SCHEMES)} URLs are supported")
            named.append(MediaUrl(modality=kind.removesuffix("_url"), url=item.url, place=place))
    return tuple(named)


def media_files(loaded: tuple[LoadedMediaItem, ...]) -> tuple[MediaFile, ...]:
    """Return `loaded` for an engine that takes media files only. Raises Unsupported for embedding files."""
    files: list[MediaFile] = []
    for item in loaded:
        if isinstance(item, EmbeddingFile):
            raise Unsupported(f"{item.place}: this engine does not take embedding files")
        files.append(item)
    return tuple(files)
