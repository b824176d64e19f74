"""The rooms of a producer: which blocks a consumer may read, and how each room ended. Plain and synchronous.

    offered ──► claimed ──► done
       │           ├──────► failed      the producer or the consumer failed
       │           └──────► cancelled   one of the two gave it up
       └──► expired | failed | cancelled

A room is identified by its number; a peer without its secret learns nothing about it and reads nothing. An ended room
is remembered for a while, so that a late claim gets the reason; its number can be used again at once.
"""

import enum
import hmac
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from baton.errors import BatonError, Cancelled, PeerLost
from baton.protocol.media import PlacedItem

K = TypeVar("K")
V = TypeVar("V")


class RoomState(enum.StrEnum):
    """The state of a room."""

    OFFERED = "offered"
    CLAIMED = "claimed"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


_MOVES = {
    RoomState.OFFERED: frozenset({RoomState.CLAIMED, RoomState.FAILED, RoomState.EXPIRED, RoomState.CANCELLED}),
    RoomState.CLAIMED: frozenset({RoomState.DONE, RoomState.FAILED, RoomState.CANCELLED}),
}


class Room:
    """One lease: its secret, and the blocks that its consumer may read."""

    __slots__ = ("blocks", "cached_tokens", "complete", "media", "number", "prompt_tokens", "secret", "state")

    def __init__(self, number: int, secret: bytes, prompt_tokens: int) -> None:
        self.number = number
        self.secret = secret
        self.prompt_tokens = prompt_tokens
        self.state = RoomState.OFFERED
        self.blocks: dict[int, None] = {}  # in prompt order
        self.media: tuple[PlacedItem, ...] | None = None
        self.complete = False
        self.cached_tokens = 0


class _Ending(NamedTuple):
    secret: bytes
    error: BatonError


class _RecentValues(Generic[K, V]):
    """The values of the last `memory_s` seconds by key, the latest `limit` of them."""

    def __init__(self, memory_s: float, limit: int, clock: Callable[[], float]) -> None:
        self._memory_s = memory_s
        self._limit = limit
        self._clock = clock
        self._values: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        until, value = self._values.get(key, (0.0, None))
        return value if until >= self._clock() else None

    def put(self, key: K, value: V) -> None:
        self.discard(key)
        self._values[key] = (self._clock() + self._memory_s, value)
        if len(self) > self._limit:
            self._values.popitem(last=False)

    def discard(self, key: K) -> None:
        self._values.pop(key, None)

    def remove_expired(self) -> None:
        now = self._clock()
        while self._values and next(iter(self._values.values()))[0] < now:
            self._values.popitem(last=False)


class Rooms:
    """The open rooms of one worker, and those that ended in the last `memory_s` seconds, at most `max_remembered`.

    Declined tickets are remembered as long, apart from them: anybody who reaches the port can decline any ticket.
    """

    def __init__(
        self, memory_s: float, clock: Callable[[], float] = time.monotonic, max_remembered: int = 10_000
    ) -> None:
        self._open: dict[int, Room] = {}
        self._ended: _RecentValues[int, _Ending] = _RecentValues(memory_s, max_remembered, clock)
        self._declined: _RecentValues[tuple[int, bytes], bool] = _RecentValues(memory_s, max_remembered, clock)
        self._endings: Counter[RoomState] = Counter()

    @property
    def open(self) -> dict[str, int]:
        """How many rooms are open, by state."""
        counts = Counter(room.state for room in tuple(self._open.values()))  # other threads read it too
        return {state.value: counts[state] for state in _MOVES}

    @property
    def ended(self) -> dict[str, int]:
        """How many rooms have ended since the start, by state."""
        return {state.value: self._endings[state] for state in RoomState if state not in _MOVES}

    @property
    def remembered(self) -> int:
        """How many ended, refused or declined rooms are remembered."""
        return len(self._ended) + len(self._declined)

    def forget_expired(self) -> None:
        """Forget what has been remembered for long enough. To be called from time to time."""
        self._ended.remove_expired()
        self._declined.remove_expired()

    def offer(self, number: int, secret: bytes, prompt_tokens: int) -> Room:
        """Open a room. Raises PeerLost while its number is in use, Cancelled if its consumer has given it up."""
        if number in self._open:
            raise PeerLost(f"bootstrap_room: {number} is in use by another request at this worker; retry with another")
        self._check_declined(number, secret)
        self._ended.discard(number)
        room = self._open[number] = Room(number, secret, prompt_tokens)
        return room

    def find_offered(self, number: int, secret: bytes) -> Room | None:
        """Return the room to claim; None if it is not open yet. Raises PeerLost, or the error that it ended with."""
        room = self._open.get(number)
        if room is None:
            self._check_declined(number, secret)
            ending = self._ended.get(number)
            if ending is not None and hmac.compare_digest(ending.secret, secret):
                raise ending.error
            return None
        self._check_secret(room, secret)
        if room.state is not RoomState.OFFERED:
            raise PeerLost(f"room {number} is already claimed")
        return room

    def claim(self, number: int, secret: bytes) -> Room | None:
        """Claim a room; None if it is not open yet. Raises PeerLost, or the error that the room ended with."""
        room = self.find_offered(number, secret)
        if room is not None:
            self._move(room, RoomState.CLAIMED)
        return room

    def check(self, number: int, secret: bytes, blocks: Sequence[int]) -> None:
        """Raise PeerLost unless these blocks may be read with this secret now."""
        room = self._open.get(number)
        if room is None or room.state is not RoomState.CLAIMED:
            raise PeerLost(f"room {number} is not open")
        self._check_secret(room, secret)
        if not room.blocks.keys() >= set(blocks):
            raise PeerLost(f"some of the requested blocks do not belong to room {number}")

    def end(self, room: Room, state: RoomState, error: BatonError | None = None) -> bool:
        """Close a room and remember the reason; return whether it was open."""
        if self._open.get(room.number) is not room:
            return False
        self._move(room, state)
        del self._open[room.number]
        self._endings[state] += 1
        reason = error or PeerLost(f"room {room.number} has ended: {state}")
        self._ended.put(room.number, _Ending(room.secret, reason))
        return True

    def refuse(self, number: int, secret: bytes, error: BatonError) -> None:
        """Remember that this room will not open, and the reason. Leaves a room alone that is open."""
        if number not in self._open:
            self._ended.put(number, _Ending(secret, error))

    def decline(self, number: int, secret: bytes) -> None:
        """Remember that the consumer of a room that is not open has given it up."""
        self._declined.put((number, secret), True)

    def _move(self, room: Room, state: RoomState) -> None:
        if state not in _MOVES[room.state]:
            raise AssertionError(f"illegal room transition from {room.state} to {state}")
        room.state = state

    def _check_secret(self, room: Room, secret: bytes) -> None:
        if not hmac.compare_digest(room.secret, secret):
            raise PeerLost(f"wrong secret for room {room.number}")

    def _check_declined(self, number: int, secret: bytes) -> None:
        if self._declined.get((number, secret)):
            raise Cancelled("the other worker has given up its claim")
