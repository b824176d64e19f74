"""Which inputs of which requests are embedded together. Pure and synchronous: it never looks at a clock or a tensor.

Requests take turns, one input each, so that a large one does not hold up a small one; what was drawn is sorted by
length, so that little of a batch is padding.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Ticket:
    """One request inside the embedder: its inputs, and the vectors that it has so far."""

    __slots__ = ("inputs", "left", "taken", "vectors")

    def __init__(self, inputs: tuple[tuple[int, ...], ...]) -> None:
        self.inputs = inputs
        self.taken = 0
        self.left = len(inputs)
        self.vectors: list[array[float]] = [array("f")] * len(inputs)

    def put(self, place: int, vector: "array[float]") -> bool:
        """Keep the vector of one input; return whether it was the last that was missing."""
        self.vectors[place] = vector
        self.left -= 1
        return self.left == 0


class Piece(NamedTuple):
    """One input of one request."""

    ticket: Ticket
    place: int

    @property
    def tokens(self) -> tuple[int, ...]:
        """What is embedded."""
        return self.ticket.inputs[self.place]


def draw(tickets: Iterable[Ticket], budget: int) -> list[Piece]:
    """Take inputs out of `tickets` in turns until they have `budget` tokens; at least one, if there is one."""
    waiting = deque(ticket for ticket in tickets if ticket.taken < len(ticket.inputs))
    pieces: list[Piece] = []
    tokens = 0
    while waiting and tokens < budget:
        ticket = waiting.popleft()
        piece = Piece(ticket, ticket.taken)
        ticket.taken += 1
        tokens += len(piece.tokens)
        pieces.append(piece)
        if ticket.taken < len(ticket.inputs):
            waiting.append(ticket)
    return pieces


def batches(pieces: list[Piece], budget: int) -> list[list[Piece]]:
    """Sort `pieces` into batches that have, padding included, at most `budget` tokens, or one input each.

    The cheapest batch comes first: a short text does not wait for long ones that were drawn with it.
    """
    made: list[list[Piece]] = []
    longest = 0
    for piece in sorted(pieces, key=lambda piece: -len(piece.tokens)):
        if not made or longest * (len(made[-1]) + 1) > budget:
            made.append([])
            longest = len(piece.tokens)
        made[-1].append(piece)
    return made[::-1]
