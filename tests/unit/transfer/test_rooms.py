"""Rooms: legal state transitions only, nothing without the secret, and bounded memory."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.errors import BatonError, Cancelled, EngineFailed, PeerLost
from baton.transfer.rooms import Rooms, RoomState

SECRET, OTHER = b"sixteen bytes ok", b"another sixteen!"
OPEN = {"offered", "claimed"}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def new_rooms(memory_s: float = 10.0, max_remembered: int = 100) -> tuple[Rooms, Clock]:
    clock = Clock()
    return Rooms(memory_s, clock, max_remembered), clock


def test_a_room_is_claimed_once_and_done() -> None:
    rooms, _ = new_rooms()
    room = rooms.offer(0, SECRET, 5)
    assert rooms.open == {"offered": 1, "claimed": 0}
    assert rooms.claim(0, SECRET) is room
    with pytest.raises(PeerLost, match="already claimed"):
        rooms.claim(0, SECRET)
    assert rooms.end(room, RoomState.DONE)
    assert not rooms.end(room, RoomState.FAILED)
    assert rooms.open == {"offered": 0, "claimed": 0}
    assert rooms.ended == {"done": 1, "failed": 0, "expired": 0, "cancelled": 0}


def test_every_operation_checks_the_secret() -> None:
    rooms, _ = new_rooms()
    room = rooms.offer(7, SECRET, 5)
    room.blocks.update({3: None, 4: None})
    with pytest.raises(PeerLost, match="wrong secret"):
        rooms.claim(7, OTHER)
    assert room.state is RoomState.OFFERED
    rooms.claim(7, SECRET)
    rooms.check(7, SECRET, [4, 3])
    with pytest.raises(PeerLost, match="wrong secret"):
        rooms.check(7, OTHER, [3])
    with pytest.raises(PeerLost, match="do not belong to room 7"):
        rooms.check(7, SECRET, [3, 5])
    rooms.end(room, RoomState.FAILED, EngineFailed("a step failed"))
    with pytest.raises(PeerLost, match="not open"):
        rooms.check(7, SECRET, [3])
    assert rooms.claim(7, OTHER) is None, "a claim with another secret does not learn how the room ended"
    with pytest.raises(EngineFailed, match="a step failed"):
        rooms.claim(7, SECRET)


def test_blocks_can_be_read_only_after_the_claim() -> None:
    rooms, _ = new_rooms()
    rooms.offer(7, SECRET, 5).blocks[3] = None
    with pytest.raises(PeerLost, match="not open"):
        rooms.check(7, SECRET, [3])


def test_a_number_can_be_used_again_once_its_room_has_ended() -> None:
    rooms, _ = new_rooms()
    room = rooms.offer(0, SECRET, 5)
    with pytest.raises(PeerLost, match="bootstrap_room: 0 is in use"):
        rooms.offer(0, OTHER, 5)
    rooms.end(room, RoomState.EXPIRED)
    again = rooms.offer(0, SECRET, 5)
    assert rooms.claim(0, SECRET) is again
    assert not rooms.end(room, RoomState.FAILED), "the room of the earlier offer ends nothing"


def test_a_claim_withdrawn_before_its_offer_is_remembered() -> None:
    rooms, clock = new_rooms(memory_s=10)
    rooms.decline(5, SECRET)
    for use in (lambda: rooms.offer(5, SECRET, 1), lambda: rooms.claim(5, SECRET)):
        with pytest.raises(Cancelled, match="given up"):
            use()
    rooms.offer(5, OTHER, 1)
    rooms.refuse(6, SECRET, EngineFailed("no"))
    rooms.offer(6, SECRET, 1)
    rooms.decline(8, SECRET)
    clock.now = 11
    rooms.offer(8, SECRET, 1)


def test_ended_rooms_are_forgotten_by_age_and_by_number() -> None:
    rooms, clock = new_rooms(memory_s=10, max_remembered=3)
    for number in range(5):
        rooms.end(rooms.offer(number, SECRET, 1), RoomState.EXPIRED)
    assert rooms.claim(0, SECRET) is None
    with pytest.raises(PeerLost):
        rooms.claim(4, SECRET)
    clock.now = 11
    assert rooms.claim(4, SECRET) is None
    rooms.end(rooms.offer(9, SECRET, 1), RoomState.EXPIRED)
    rooms.forget_expired()
    assert rooms.remembered == 1, "expired records are removed"


def test_declines_displace_no_ended_rooms() -> None:
    rooms, _ = new_rooms(max_remembered=3)
    rooms.end(rooms.offer(0, SECRET, 1), RoomState.EXPIRED)
    for number in range(10):
        rooms.decline(number, OTHER)
    assert rooms.remembered == 4
    with pytest.raises(PeerLost, match="expired"):
        rooms.claim(0, SECRET)


def test_an_unclaimed_room_cannot_be_done() -> None:
    rooms, _ = new_rooms()
    with pytest.raises(AssertionError, match="from offered to done"):
        rooms.end(rooms.offer(1, SECRET, 1), RoomState.DONE)


class AnyOrder(RuleBasedStateMachine):
    """Any sequence of operations agrees with a plain restatement of the rules."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms, self.clock = new_rooms()
        self.states: dict[int, tuple[bytes, str]] = {}
        self.handles: dict[int, object] = {}
        self.offered = 0

    numbers, secrets = st.integers(0, 3), st.sampled_from([SECRET, OTHER])

    @rule(number=numbers, secret=secrets)
    def offer(self, number: int, secret: bytes) -> None:
        taken = self.states.get(number, (b"", "none"))[1] in OPEN
        try:
            self.handles[number] = self.rooms.offer(number, secret, 1)
        except BatonError:
            assert taken
        else:
            assert not taken
            self.offered += 1
            self.states[number] = (secret, "offered")

    @rule(number=numbers, secret=secrets)
    def claim(self, number: int, secret: bytes) -> None:
        known, state = self.states.get(number, (b"", "none"))
        may = state == "offered" and known == secret
        try:
            got = self.rooms.claim(number, secret)
        except PeerLost:
            assert state != "none"
            assert not may
        else:
            assert (got is not None) == may
            if may:
                self.states[number] = (secret, "claimed")

    @rule(number=numbers, state=st.sampled_from(["done", "failed", "cancelled"]))
    def end(self, number: int, state: str) -> None:
        known, now = self.states.get(number, (b"", "none"))
        if now not in OPEN or (now == "offered" and state == "done"):
            return
        assert self.rooms.end(self.handles[number], RoomState(state))  # type: ignore[arg-type]
        self.states[number] = (known, state)

    @invariant()
    def counts_agree(self) -> None:
        states = [state for _, state in self.states.values()]
        assert self.rooms.open == {name: states.count(name) for name in ("offered", "claimed")}
        assert sum(self.rooms.ended.values()) + sum(self.rooms.open.values()) == self.offered


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
