"""Moving KV from the worker that computed it to the worker that goes on from it.

    prefill worker                              decode worker
    engine ──KvComputed──► Lease ═══ room ═══ Claim ◄──KvWanted── engine
                                                └──on_arrived──► engine.received

A prefill worker offers the KV of one request, a decode worker claims it. They meet in a room: a number that both sides
know, and a secret. Failure, cancellation, expiry and loss on one side reach the other. Handlers use `Producer` and
`Consumer`; a `TransportServer` and a `Channel` move the bytes. Engines that move KV by themselves have rooms too: the
room carries the address where they connect, and the confirmation that the KV has been read.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from baton.errors import BatonError
from baton.protocol.handoff import Ticket
from baton.protocol.outputs import KvComputed, KvWanted


class KvShape(msgspec.Struct, frozen=True, kw_only=True):
    """What two caches must have in common for the blocks of one to be blocks of the other."""

    model: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int


class KvMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache of an engine as bytes.

    It is `planes` stretches of equal length, one after the other from `address` (keys and values of each layer); a
    stretch holds its part of every block, in the order of their numbers. `descriptor` is the file that the memory is a
    mapping of from its beginning, if other processes may map it too.
    """

    shape: KvShape
    address: int
    planes: int
    plane_bytes: int
    block_bytes: int
    blocks: int
    device: str = "cpu"
    descriptor: int | None = None

    @property
    def nbytes(self) -> int:
        """The length of the whole."""
        return self.planes * self.plane_bytes


class Lease(Protocol):
    """The KV of one request, held for whoever has its ticket. Event-loop thread only."""

    def computed(self, output: KvComputed) -> None:
        """Further blocks can be taken."""

    def fail(self, error: BatonError) -> None:
        """There is nothing to take, or no longer; a borrower is told why. Does nothing after the end."""

    def on_lost(self, callback: Callable[[BatonError], None]) -> None:
        """Call `callback` when the lease ends in any way but by being taken, with what `ended` raises."""

    async def ended(self) -> None:
        """Wait until the lease has ended; on return the KV has been taken and nobody will read it any more.

        Raises Cancelled when the borrower did not want it after all, PeerLost when it went away or nobody came in time,
        and what `fail` was given. In these cases too nobody reads it any more, or nobody believes what he read.
        """


class Producer(Protocol):
    """Where KV of this worker can be had."""

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port that tickets name."""

    def offer(self, ticket: Ticket, prompt_tokens: int) -> Lease:
        """Open the room of `ticket`. Raises InvalidRequest if it is in use.

        The lease ends by itself when nobody has claimed it in time.
        """

    def refuse(self, ticket: Ticket, error: BatonError) -> None:
        """There will be no lease: who comes with this ticket is told why."""


class Claim(Protocol):
    """KV on its way here. Event-loop thread only."""

    @property
    def cached_tokens(self) -> int | None:
        """How much of the prompt the lender had not to compute, once everything has arrived."""

    async def claimed(self) -> None:
        """Wait until the room is ours. Raises PeerLost, or the lender's own reason."""

    async def meeting(self) -> tuple[str, int]:
        """Wait until the room is ours; return where the engines meet that move KV by themselves. Raises PeerLost."""

    def taken(self) -> None:
        """The engine has fetched the KV by itself; the lender is told. Idempotent."""

    def place(self, wanted: KvWanted) -> None:
        """Say where the KV goes; it is fetched from now on, while it is computed."""

    def give_up(self) -> None:
        """Want no more of it; a lender that still holds the KV is told so. Idempotent."""

    async def close(self) -> None:
        """Give up. On return nothing is written into this worker's memory any more. Idempotent."""


class Consumer(Protocol):
    """How this worker gets the KV of others."""

    def claim(self, ticket: Ticket, on_arrived: Callable[[], None], on_lost: Callable[[BatonError], None]) -> Claim:
        """Claim the room of `ticket`. Exactly one of the callbacks is called, once, unless the loan is closed before.

        `on_lost` gets PeerLost, or the lender's own reason.
        """

    def decline(self, ticket: Ticket) -> None:
        """Tell the lender that nobody will come with this ticket."""


# Called as check(room, secret, blocks): raises PeerLost unless these blocks are lent in that room, for that secret.
Check = Callable[[int, bytes, Sequence[int]], None]


class TransportServer(Protocol):
    """One way in which others can read this worker's memory."""

    @property
    def name(self) -> str:
        """What the way is called."""

    async def open(self) -> dict[str, object]:
        """Return what the other side needs for `reach`, for one whose claim has been accepted. Raises PeerLost."""

    async def close(self) -> None:
        """End it. Idempotent."""


class TransportClient(Protocol):
    """One way in which this worker reads the memory of others."""

    @property
    def name(self) -> str:
        """What the way is called."""

    async def connect(self, ticket: Ticket, memory: KvMemory, details: dict[str, object]) -> "Channel":
        """Return the path to a lender whose `memory` looks like that, from what its source said. Raises PeerLost."""

    async def close(self) -> None:
        """End it, after all of its paths. Idempotent."""


class Channel(Protocol):
    """A way from one lender's memory into this worker's."""

    async def fetch(self, ticket: Ticket, theirs: Sequence[int], mine: Sequence[int]) -> None:
        """Copy blocks `theirs` of the lender into blocks `mine` of this worker, in that order. Raises PeerLost.

        When it has ended, in whatever way, cancelled too, nothing is written into `mine` any more.
        """

    def close(self) -> None:
        """Give up what it holds, once no fetch is on its way. Idempotent."""
