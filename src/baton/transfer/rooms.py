"""The rooms of a producer: which blocks a consumer may read, and how each room ended. Plain and synchronous.

    offered ──► claimed ──► done
       │           ├──────► failed      the prefill or the consumer failed
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
from typing import NamedTuple

from baton.errors import BatonError, Cancelled, PeerLost


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

    __slots__ = ("blocks", "cached_tokens", "complete", "number", "prompt_tokens", "secret", "state")

    def __init__(self, number: int, secret: bytes, prompt_tokens: int) -> None:
        self.number = number
        self.secret = secret
        self.prompt_tokens = prompt_tokens
        self.state = RoomState.OFFERED
        self.blocks: dict[int, None] = {}  # in prompt order
        self.complete = False
        self.cached_tokens = 0


class _Ending(NamedTuple):
    secret: bytes
    error: BatonError
    was_open: bool
    until: float


class Rooms:
    """The open rooms of one worker, and those that ended in the last `memory_s` seconds, at most `max_remembered`."""

    def __init__(
        self, memory_s: float, clock: Callable[[], float] = time.monotonic, max_remembered: int = 10_000
    ) -> None:
        self._memory_s = memory_s
        self._max_remembered = max_remembered
        self._clock = clock
        self._open: dict[int, Room] = {}
        self._ended: OrderedDict[int, _Ending] = OrderedDict()
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
        """How many ended or refused rooms are remembered."""
        return len(self._ended)

    def offer(self, number: int, secret: bytes, prompt_tokens: int) -> Room:
        """Open a room. Raises PeerLost while its number is in use, Cancelled if its consumer has given it up."""
        if number in self._open:
            raise PeerLost(f"bootstrap_room: {number} is in use by another request at this worker; retry with another")
        ending = self._remembered(number, secret)
        if ending is not None and not ending.was_open and isinstance(ending.error, Cancelled):
            raise ending.error
        self._ended.pop(number, None)
        room = self._open[number] = Room(number, secret, prompt_tokens)
        return room

    def find_offered(self, number: int, secret: bytes) -> Room | None:
        """Return the room to claim; None if it is not open yet. Raises PeerLost, or the error that it ended with."""
        room = self._open.get(number)
        if room is None:
            ending = self._remembered(number, secret)
            if ending is not None:
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
        self._remember(room.number, room.secret, reason, was_open=True)
        return True

    def refuse(self, number: int, secret: bytes, error: BatonError) -> None:
        """Remember that this room will not open, and the reason. Leaves a room alone that is open."""
        if number not in self._open:
            self._remember(number, secret, error, was_open=False)

    def _move(self, room: Room, state: RoomState) -> None:
        if state not in _MOVES[room.state]:
            raise AssertionError(f"illegal room transition from {room.state} to {state}")
        room.state = state

    def _check_secret(self, room: Room, secret: bytes) -> None:
        if not hmac.compare_digest(room.secret, secret):
            raise PeerLost(f"wrong secret for room {room.number}")

    def _remembered(self, number: int, secret: bytes) -> _Ending | None:
        ending = self._ended.get(number)
        if ending is None or ending.until < self._clock() or not hmac.compare_digest(ending.secret, secret):
            return None
        return ending

    def _remember(self, number: int, secret: bytes, error: BatonError, was_open: bool) -> None:
        now = self._clock()
        self._ended.pop(number, None)
        self._ended[number] = _Ending(secret, error, was_open, now + self._memory_s)
        while self._ended and (self.remembered > self._max_remembered or self._oldest().until < now):
            self._ended.popitem(last=False)

    def _oldest(self) -> _Ending:
        return next(iter(self._ended.values()))
