"""The media of a request on their way to the engine: fetched here, or encoded by another worker that holds them.

What another worker holds is on loan: it is claimed before the engine is told of it, and the other worker hears when it
has been used, or is not wanted any more.
"""

from baton.errors import BatonError, InvalidRequest, PeerLost, Unsupported
from baton.handlers.tickets import encoder_ticket
from baton.ports.engine import Capabilities
from baton.ports.media import MediaLoader
from baton.ports.transfer import Claim, Consumer
from baton.protocol.media import Media, MediaHandles, MediaUrl
from baton.protocol.requests import GenerateRequest
from baton.request.tracker import TrackedRequest

FETCHED = ("http://", "https://", "data:")


class LoadedMedia:
    """The media of one request, ready for the engine."""

    def __init__(self, items: tuple[Media, ...] = (), claim: Claim | None = None) -> None:
        self.items = items
        self._claim = claim

    def used(self) -> None:
        """The engine has read them. Idempotent."""
        if self._claim is not None:
            self._claim.taken()

    def passed_on(self) -> "LoadedMedia":
        """Return the same media for another owner; closing these does nothing from now on."""
        claim, self._claim = self._claim, None
        return LoadedMedia(self.items, claim)

    async def close(self) -> None:
        """They are not wanted any more. Idempotent."""
        if self._claim is not None:
            await self._claim.close()


class MediaInput:
    """How media get in at one worker: `loader` for those that a request names, `borrower` for those held elsewhere."""

    def __init__(self, loader: MediaLoader | None = None, consumer: Consumer | None = None) -> None:
        self._loader = loader
        self._consumer = consumer

    async def load(self, request: GenerateRequest, tracked: TrackedRequest, can: Capabilities) -> LoadedMedia:
        """Return the media of `request` for an engine that `can`; whoever asks closes them.

        Raises Unsupported, InvalidRequest, PeerLost, or what the call is ended with.
        """
        if request.encoder_result is not None:
            return await self._claim(request.encoder_result, tracked, can)
        if not request.media:
            return LoadedMedia()
        _refuse_unread(request, can)
        if self._loader is None:
            raise Unsupported("multi_modal_data: this worker fetches no media")
        return LoadedMedia(await tracked.scope.wait(self._loader.load(named_media(request))))

    async def close(self) -> None:
        """Give up what is held open. Idempotent."""
        if self._loader is not None:
            await self._loader.close()

    async def _claim(self, result: dict[str, object], tracked: TrackedRequest, can: Capabilities) -> LoadedMedia:
        if not can.media_handles or self._consumer is None:
            raise Unsupported("encoder_result: this engine does not read what encode workers hold")
        ticket, params = encoder_ticket(result)

        def lost(error: BatonError) -> None:
            tracked.scope.fire(PeerLost(f"what an encode worker held for this request is gone: {error.message}"))

        claim = self._consumer.claim(ticket, lambda: None, lost)
        try:
            # Until the room is ours, what the parameters name may have been freed, and be somebody else's by now.
            await tracked.scope.wait(claim.claimed())
        except BaseException:
            await claim.close()
            raise
        return LoadedMedia((MediaHandles(params=params),), claim)


def named_media(request: GenerateRequest) -> tuple[MediaUrl, ...]:
    """Return the media that `request` names, in its order. Raises InvalidRequest or Unsupported."""
    found: list[MediaUrl] = []
    for kind, items in (request.media or {}).items():
        for number, item in enumerate(items):
            place = f"multi_modal_data.{kind}[{number}]"
            if item.url is None:
                raise Unsupported(f"{place}: media that the frontend has decoded is not taken; send a URL")
            if not item.url[:8].lower().startswith(FETCHED):
                raise InvalidRequest(f"{place}: only {', '.join(FETCHED)} URLs are fetched")
            found.append(MediaUrl(modality=kind.removesuffix("_url"), url=item.url, place=place))
    return tuple(found)


def _refuse_unread(request: GenerateRequest, can: Capabilities) -> None:
    for kind in request.media or ():
        if kind.removesuffix("_url") in can.modalities:
            continue
        if can.media_handles:
            raise Unsupported(
                f"multi_modal_data.{kind}: this engine takes media from encode workers, and none has encoded them:"
                " none is there, or it could not"
            )
        raise Unsupported(f"multi_modal_data.{kind}: this engine takes {', '.join(sorted(can.modalities))} only")
