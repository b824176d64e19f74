"""The rooms of a prefill worker: who may take what, and how it ended. Plain and synchronous.

    offered ──► claimed ──► done
       │           ├──────► failed      the prefill, or the worker that came for it, did not get through
       │           └──────► cancelled   it was not wanted after all
       └──► expired | failed | cancelled

A room is known by its number; nothing is told or given to who does not have its secret. An ended room is remembered for
a while, so that who comes late is told why; its number can be used again at once.
"""

import enum
import hmac
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from baton.errors import BatonError, Cancelled, InvalidRequest, PeerLost

MAX_REMEMBERED = 10_000


class RoomState(enum.StrEnum):
    """Where a room is."""

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
    """One lease: its secret, and the blocks that its holder may read."""

    __slots__ = ("blocks", "cached_tokens", "complete", "number", "prompt_tokens", "secret", "state")

    def __init__(self, number: int, secret: bytes, prompt_tokens: int) -> None:
        self.number = number
        self.secret = secret
        self.prompt_tokens = prompt_tokens
        self.state = RoomState.OFFERED
        self.blocks: dict[int, None] = {}  # in the order of the prompt
        self.complete = False
        self.cached_tokens = 0


class _Ending(NamedTuple):
    secret: bytes
    error: BatonError
    was_open: bool
    until: float


class Rooms:
    """The open rooms of one worker, and for `memory_s` those that have ended."""

    def __init__(self, memory_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory_s = memory_s
        self._clock = clock
        self._open: dict[int, Room] = {}
        self._ended: OrderedDict[int, _Ending] = OrderedDict()
        self._endings: Counter[RoomState] = Counter()

    @property
    def open(self) -> dict[str, int]:
        """How many rooms are open, by state."""
        counts = Counter(room.state for room in tuple(self._open.values()))  # may be asked from another thread
        return {state.value: counts[state] for state in _MOVES}

    @property
    def ended(self) -> dict[str, int]:
        """How many rooms have ended since the start, by state."""
        return {state.value: self._endings[state] for state in RoomState if state not in _MOVES}

    def offer(self, number: int, secret: bytes, prompt_tokens: int) -> Room:
        """Open a room. Raises InvalidRequest while its number is in use, Cancelled if its visitor has left already."""
        if number in self._open:
            raise InvalidRequest(f"bootstrap_room: {number} is in use")
        ending = self._remembered(number, secret)
        if ending is not None and not ending.was_open and isinstance(ending.error, Cancelled):
            raise ending.error
        self._ended.pop(number, None)
        room = self._open[number] = Room(number, secret, prompt_tokens)
        return room

    def claim(self, number: int, secret: bytes) -> Room | None:
        """Let somebody in; None if the room is not there yet. Raises PeerLost, or why the room has ended."""
        room = self._open.get(number)
        if room is None:
            ending = self._remembered(number, secret)
            if ending is not None:
                raise ending.error
            return None
        self._check_secret(room, secret)
        if room.state is not RoomState.OFFERED:
            raise PeerLost(f"room {number} is claimed by somebody else")
        self._move(room, RoomState.CLAIMED)
        return room

    def check(self, number: int, secret: bytes, blocks: Sequence[int]) -> None:
        """Raise PeerLost unless these blocks may be read now with this secret."""
        room = self._open.get(number)
        if room is None or room.state is not RoomState.CLAIMED:
            raise PeerLost(f"room {number} is not open")
        self._check_secret(room, secret)
        if not room.blocks.keys() >= set(blocks):
            raise PeerLost(f"blocks were asked for that are not of room {number}")

    def end(self, room: Room, state: RoomState, error: BatonError | None = None) -> bool:
        """Close a room and remember why; return whether it was open."""
        if self._open.get(room.number) is not room:
            return False
        self._move(room, state)
        del self._open[room.number]
        self._endings[state] += 1
        why = error or PeerLost(f"room {room.number} has ended: {state}")
        self._remember(room.number, room.secret, why, was_open=True)
        return True

    def find(self, number: int, secret: bytes) -> Room | None:
        """Return the open room with this secret, if there is one."""
        room = self._open.get(number)
        return room if room is not None and hmac.compare_digest(room.secret, secret) else None

    def refuse(self, number: int, secret: bytes, error: BatonError) -> None:
        """Remember that there will be no such room, and why."""
        if number not in self._open:
            self._remember(number, secret, error, was_open=False)

    def _move(self, room: Room, state: RoomState) -> None:
        if state not in _MOVES[room.state]:
            raise AssertionError(f"a room does not go from {room.state} to {state}")
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
        while self._ended and (len(self._ended) > MAX_REMEMBERED or next(iter(self._ended.values())).until < now):
            self._ended.popitem(last=False)
