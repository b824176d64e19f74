"""Chooses which inputs of which requests are embedded together. Pure.

Requests take turns, one input each, so that a large request does not delay a small one. The inputs that were taken are
sorted by length, so that little of a batch is padding.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class PendingRequest:
    """One request inside the embedder: its inputs, and the vectors computed so far."""

    __slots__ = ("inputs", "missing", "taken", "vectors")

    def __init__(self, inputs: tuple[tuple[int, ...], ...]) -> None:
        self.inputs = inputs
        self.taken = 0
        self.missing = len(inputs)
        self.vectors: list[array[float]] = [array("f")] * len(inputs)

    def put(self, position: int, vector: "array[float]") -> bool:
        """Store the vector of one input; return whether it was the last one missing."""
        self.vectors[position] = vector
        self.missing -= 1
        return self.missing == 0


class EmbedInput(NamedTuple):
    """One input of one request."""

    request: PendingRequest
    position: int

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens to embed."""
        return self.request.inputs[self.position]


def take_inputs(requests: Iterable[PendingRequest], budget: int) -> list[EmbedInput]:
    """Take inputs of `requests` in turns until they have `budget` tokens; at least one, if there is one."""
    waiting = deque(request for request in requests if request.taken < len(request.inputs))
    inputs: list[EmbedInput] = []
    tokens = 0
    while waiting and tokens < budget:
        request = waiting.popleft()
        taken = EmbedInput(request, request.taken)
        request.taken += 1
        tokens += len(taken.tokens)
        inputs.append(taken)
        if request.taken < len(request.inputs):
            waiting.append(request)
    return inputs


def make_batches(inputs: list[EmbedInput], budget: int) -> list[list[EmbedInput]]:
    """Sort `inputs` into batches of at most `budget` tokens with padding, or of one input.

    The cheapest batch comes first: a short text does not wait for long ones that were taken with it.
    """
    batches: list[list[EmbedInput]] = []
    longest = 0
    for one in sorted(inputs, key=lambda one: -len(one.tokens)):
        if not batches or longest * (len(batches[-1]) + 1) > budget:
            batches.append([])
            longest = len(one.tokens)
        batches[-1].append(one)
    return batches[::-1]
