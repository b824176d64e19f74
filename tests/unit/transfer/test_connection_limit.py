"""Connections of a port: a limit for all of them, and a fair choice of the one that is closed."""

from hypothesis import given
from hypothesis import strategies as st

from baton.transfer.connection_limit import ConnectionLimit, ConnectionSlot


class Port:
    """A limit, and the names of the connections that it closed."""

    def __init__(self, limit: int) -> None:
        self.limit = ConnectionLimit(limit)
        self.closed: list[str] = []

    def admit(self, host: str, name: str) -> ConnectionSlot | None:
        return self.limit.admit(host, lambda: self.closed.append(name))


def test_the_oldest_unverified_connection_of_the_host_with_most_of_them_is_closed() -> None:
    port = Port(5)
    for host, name in (("b", "b1"), ("a", "a1"), ("a", "a2"), ("a", "a3"), ("a", "a4"), ("b", "b2"), ("c", "c1")):
        assert port.admit(host, name) is not None
    assert port.closed == ["a1", "a2"]
    assert port.limit.connections == 5


def test_a_verified_connection_is_never_closed_for_another() -> None:
    port = Port(2)
    first, second = port.admit("a", "a1"), port.admit("a", "a2")
    assert first is not None
    assert second is not None
    first.verify()
    assert port.admit("b", "b1") is not None
    assert port.closed == ["a2"]
    second.release()  # it has been closed for another before
    third = port.admit("b", "b2")
    assert third is not None
    assert port.closed == ["a2", "b1"]
    third.verify()
    assert port.admit("c", "c1") is None
    first.release()
    first.release()
    assert port.admit("c", "c1") is not None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["verify", "release", "stay"])), max_size=40))
def test_there_are_never_more_connections_than_the_limit(steps: list[tuple[str, str]]) -> None:
    port = Port(3)
    for number, (host, then) in enumerate(steps):
        slot = port.admit(host, str(number))
        if slot is not None and then == "verify":
            slot.verify()
        elif slot is not None and then == "release":
            slot.release()
        assert port.limit.connections <= 3
