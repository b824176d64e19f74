"""Media input: the media of a request are fetched here, or were encoded by an encode worker that holds them.

Encoded media are claimed before the engine gets their handles. The claim confirms to the encode worker that they have
been read, or gives them up.
"""

from types import TracebackType

import msgspec

from baton.errors import BatonError, InvalidRequest, PeerLost, Unsupported
from baton.handlers.plain_prompt import plain_prompt
from baton.handlers.tickets import encoder_ticket
from baton.ports.engine import Capabilities, MediaInfo, Work
from baton.ports.media import MediaLoader
from baton.ports.transfer import Claim, Consumer
from baton.protocol.media import Media, MediaHandles, MediaUrl
from baton.protocol.requests import GenerateRequest
from baton.request.tracker import TrackedRequest

URL_SCHEMES = ("http://", "https://", "data:")


class LoadedMedia:
    """The media of one request, ready for the engine. As a context manager, it closes them."""

    def __init__(
        self, items: tuple[Media, ...] = (), claim: Claim | None = None, token_ids: tuple[int, ...] | None = None
    ) -> None:
        self.items = items
        self._claim = claim
        self._token_ids = token_ids

    async def __aenter__(self) -> "LoadedMedia":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def attach(self, work: Work) -> Work:
        """Return `work` with these media, and the prompt that goes with them."""
        if not self.items:
            return work
        return msgspec.structs.replace(work, media=self.items, token_ids=self._token_ids or work.token_ids)

    def used(self) -> None:
        """The engine has read them. Idempotent."""
        if self._claim is not None:
            self._claim.taken()

    def transfer(self) -> "LoadedMedia":
        """Return the same media for a new owner; closing this one has no effect from now on."""
        claim, self._claim = self._claim, None
        return LoadedMedia(self.items, claim, self._token_ids)

    async def close(self) -> None:
        """Give up what has not been read. Idempotent."""
        if self._claim is not None:
            await self._claim.close()


class MediaInput:
    """Loads media at one worker: `loader` fetches those that a request names, `consumer` claims encoded ones."""

    def __init__(
        self, loader: MediaLoader | None = None, consumer: Consumer | None = None, media: MediaInfo | None = None
    ) -> None:
        self._loader = loader
        self._consumer = consumer
        self._media = media

    async def load(self, request: GenerateRequest, tracked: TrackedRequest, can: Capabilities) -> LoadedMedia:
        """Return the media of a request that has passed admission; the caller closes them.

        Raises Unsupported, InvalidRequest, PeerLost, or the error that the cancel scope fires with.
        """
        if request.encoder_result is not None:
            token_ids = plain_prompt(request, self._media)
            return await self._claim(request.encoder_result, token_ids, tracked, can)
        if not request.media:
            return LoadedMedia()
        if self._loader is None:
            raise Unsupported("multi_modal_data: this worker does not fetch media")
        token_ids = plain_prompt(request, self._media)
        files = await tracked.scope.wait(self._loader.load(named_media(request)))
        return LoadedMedia(files, token_ids=token_ids)

    async def close(self) -> None:
        """Close the loader. Idempotent."""
        if self._loader is not None:
            await self._loader.close()

    async def _claim(
        self, result: dict[str, object], token_ids: tuple[int, ...], tracked: TrackedRequest, can: Capabilities
    ) -> LoadedMedia:
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
        return LoadedMedia((MediaHandles(params=params),), claim, token_ids)


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
