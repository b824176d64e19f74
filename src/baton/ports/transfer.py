"""Moving KV from the prefill worker that computed it to the decode worker that continues from it.

    prefill worker                              decode worker
    engine ──KvComputed──► Lease ═══ room ═══ Claim ◄──KvWanted── engine
                                                └──on_arrived──► engine.received

A prefill worker offers the KV of one request, a decode worker claims it. A room connects them: a number that both sides
know, and a secret. Failure, cancellation, expiry and loss on one side reach the other. Handlers use `Producer` and
`Consumer`; a `TransportServer` and a `Channel` move the bytes. Engines that move KV themselves have rooms too: the room
carries their bootstrap address, and the confirmation that the KV has been read.

The rows of encoded media move in the same way, from an encode worker to the worker that computes the prompt: blocks of
an embedding store instead of blocks of a KV cache.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from baton.errors import BatonError
from baton.protocol.handoff import Ticket
from baton.protocol.media import PlacedItem
from baton.protocol.outputs import KvComputed, KvWanted


class KvShape(msgspec.Struct, frozen=True, kw_only=True, tag="kv"):
    """What two KV caches must have in common for a block of one to be valid in the other."""

    model: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int


class EmbeddingShape(msgspec.Struct, frozen=True, kw_only=True, tag="embedding"):
    """What an encoder and a language model must have in common for rows of the one to be valid in the other.

    `model` identifies the encoder with its preprocessing; a row has `size` numbers of type `dtype`.
    """

    model: str
    dtype: str
    size: int


class BlockMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in blocks that other workers may read: a KV cache, or embeddings of media.

    It consists of `planes` planes of equal length, contiguous from `address` (keys and values of each layer; one plane
    for embeddings); a plane holds its part of every block, in block order. `descriptor` is the file that the memory
    maps from offset 0, if other processes may map it too.
    """

    shape: KvShape | EmbeddingShape
    address: int
    planes: int
    plane_bytes: int
    block_bytes: int
    blocks: int
    device: str = "cpu"
    descriptor: int | None = None

    @property
    def nbytes(self) -> int:
        """The size of all planes."""
        return self.planes * self.plane_bytes


class Lease(Protocol):
    """The KV of one request, held for the consumer that has its ticket. Event-loop thread only."""

    @property
    def claimed(self) -> bool:
        """Whether a consumer has claimed it, also one that is gone again. Until then nobody has read anything."""

    def placed(self, media: Sequence[PlacedItem]) -> None:
        """Send the consumer the encoded media of the prompt, once. Required if the request names media."""

    def computed(self, output: KvComputed) -> None:
        """Make further blocks readable by the consumer."""

    def fail(self, error: BatonError) -> None:
        """End the lease and send `error` to the consumer as the reason. Does nothing after the end."""

    def on_lost(self, callback: Callable[[BatonError], None]) -> None:
        """Call `callback` with the error that `ended` raises when the lease ends without its KV being taken."""

    async def ended(self) -> None:
        """Wait until the lease has ended; on return the KV has been taken and is not read again.

        Raises Cancelled when the consumer gave the KV up, PeerLost when the consumer was lost or none claimed the room
        in time, and the error given to `fail`. In these cases a read that is still running is discarded.
        """


class Producer(Protocol):
    """Offers the KV of this worker to others."""

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that tickets name."""

    def offer(self, ticket: Ticket, prompt_tokens: int) -> Lease:
        """Open the room of `ticket`. Raises PeerLost if it is in use, Cancelled if its consumer has given it up.

        The lease expires when it is not claimed in time.
        """

    def refuse(self, ticket: Ticket, error: BatonError) -> None:
        """Answer every claim for this ticket with `error`: there will be no lease. Does nothing if there is one."""


class Claim(Protocol):
    """The KV of one request, on its way to this worker. Event-loop thread only."""

    @property
    def cached_tokens(self) -> int | None:
        """How many tokens of the prompt the producer found in its prefix cache; known when the KV has arrived."""

    @property
    def transport(self) -> str | None:
        """What has moved the KV to this worker's memory; None if nothing has been moved, or the engine moves it."""

    @property
    def moved_bytes(self) -> int:
        """How many bytes have been moved so far."""

    async def media(self) -> tuple[PlacedItem, ...]:
        """Return the encoded media of the prompt, when the producer knows them. Raises as `claimed` does.

        For requests that name media: the producer sends none for others.
        """

    async def claimed(self) -> None:
        """Wait until the producer has accepted the claim. Raises PeerLost, or the producer's error."""

    async def bootstrap_address(self) -> tuple[str, int]:
        """Return the host and port where engines that move KV themselves connect to each other.

        It is a constant of the producer: the first claim waits until it is accepted, later claims return at once. If
        the producer was restarted with another address meanwhile, `on_lost` gets PeerLost. Raises PeerLost, or the
        producer's error.
        """

    def taken(self) -> None:
        """Confirm to the producer that the engine has read the KV itself. Idempotent."""

    def place(self, *wanted: KvWanted) -> None:
        """Set the blocks that the KV goes to; fetching starts now, while the rest is computed.

        Each `wanted` is a part of the producer's blocks, in their order; what is in none of them is not fetched.
        """

    def give_up(self) -> None:
        """Cancel the claim, also at a producer that still holds the KV. Idempotent."""

    async def close(self) -> None:
        """Give up. After return nothing is written into this worker's memory. Idempotent."""


class Consumer(Protocol):
    """Claims the KV of other workers."""

    def claim(self, ticket: Ticket, on_arrived: Callable[[], None], on_lost: Callable[[BatonError], None]) -> Claim:
        """Claim the room of `ticket`. Exactly one of the callbacks is called, once, unless the claim is closed before.

        `on_lost` gets PeerLost, or the producer's error. If `on_arrived` raises, `on_lost` is called as well.
        """

    def decline(self, ticket: Ticket) -> None:
        """Notify the producer that this ticket will not be used."""


# Called as check(room, secret, blocks): raises PeerLost unless that room, with that secret, offers these blocks.
Check = Callable[[int, bytes, Sequence[int]], None]


class TransportServer(Protocol):
    """The producer's end of one transport: lets other workers read this worker's memory."""

    @property
    def name(self) -> str:
        """The name of the transport, as in `--kv-transports`."""

    async def open(self) -> dict[str, object]:
        """Return the details that a consumer passes to `TransportClient.connect`. Raises PeerLost.

        They are sent only to a consumer whose claim has been accepted.
        """

    async def close(self) -> None:
        """Stop serving. Idempotent."""


class TransportClient(Protocol):
    """The consumer's end of one transport: reads the memory of other workers."""

    @property
    def name(self) -> str:
        """The name of the transport, as in `--kv-transports`."""

    async def connect(self, ticket: Ticket, memory: BlockMemory, details: dict[str, object]) -> "Channel":
        """Return a channel to a producer with this `memory`, from the details its server returned. Raises PeerLost."""

    async def close(self) -> None:
        """Free its resources, after all of its channels are closed. Idempotent."""


class Channel(Protocol):
    """Copies blocks from one producer's memory into this worker's."""

    async def fetch(self, ticket: Ticket, theirs: Sequence[int], mine: Sequence[int]) -> None:
        """Copy blocks `theirs` of the producer into blocks `mine` of this worker, in that order. Raises PeerLost.

        After it has ended, by cancellation too, nothing is written into `mine`.
        """

    def close(self) -> None:
        """Free its resources when no fetch is running. Idempotent."""
