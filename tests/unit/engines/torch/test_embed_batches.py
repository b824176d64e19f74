"""Which inputs are embedded together: all of them once, in turns, and with little padding."""

from hypothesis import given
from hypothesis import strategies as st

from baton.engines.torch.embed_batches import Piece, Ticket, batches, draw

INPUTS = st.lists(st.integers(1, 50).map(lambda length: (1,) * length), min_size=1, max_size=20).map(tuple)
TICKETS = st.lists(INPUTS, max_size=8)
BUDGET = st.integers(1, 200)


@given(TICKETS, BUDGET)
def test_every_input_is_drawn_once_and_in_order(requests: list[tuple[tuple[int, ...], ...]], budget: int) -> None:
    tickets = [Ticket(inputs) for inputs in requests]
    drawn: list[Piece] = []
    while pieces := draw(tickets, budget):
        drawn += pieces
    for ticket in tickets:
        assert [piece.place for piece in drawn if piece.ticket is ticket] == list(range(len(ticket.inputs)))


@given(TICKETS, BUDGET)
def test_no_more_is_drawn_than_asked_for(requests: list[tuple[tuple[int, ...], ...]], budget: int) -> None:
    pieces = draw([Ticket(inputs) for inputs in requests], budget)
    assert sum(len(piece.tokens) for piece in pieces[:-1]) < budget


def test_a_small_request_does_not_wait_for_a_large_one() -> None:
    large, small = Ticket(((1,) * 10,) * 1000), Ticket(((1,) * 10,))
    draw([large], 100)
    pieces = draw([large, small], 100)
    assert small in [piece.ticket for piece in pieces]


@given(TICKETS, BUDGET)
def test_batches_hold_everything_within_the_budget(requests: list[tuple[tuple[int, ...], ...]], budget: int) -> None:
    pieces = draw([Ticket(inputs) for inputs in requests], 10_000)
    made = batches(pieces, budget)
    assert sorted(map(id, (piece for batch in made for piece in batch))) == sorted(map(id, pieces))
    for batch in made:
        padded = len(batch) * max(len(piece.tokens) for piece in batch)
        assert padded <= budget or len(batch) == 1
    lengths = [len(batch[0].tokens) for batch in made]
    assert lengths == sorted(lengths)


def test_a_ticket_is_done_when_its_last_vector_is_there() -> None:
    from array import array

    ticket = Ticket(((1,), (2,)))
    assert not ticket.put(1, array("f", [2.0]))
    assert ticket.put(0, array("f", [1.0]))
    assert [vector[0] for vector in ticket.vectors] == [1.0, 2.0]
