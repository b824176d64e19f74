"""Which inputs are embedded together: every input once, requests in turns, little padding."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from baton.engines.torch.embed_batches import EmbedInput, PendingRequest, make_batches, take_inputs

INPUTS = st.lists(st.integers(1, 50).map(lambda length: (1,) * length), min_size=1, max_size=20).map(tuple)
REQUESTS = st.lists(INPUTS, max_size=8)
BUDGET = st.integers(1, 200)


@given(REQUESTS, BUDGET)
def test_every_input_is_taken_once_and_in_order(requests: list[tuple[tuple[int, ...], ...]], budget: int) -> None:
    pending = [PendingRequest(inputs) for inputs in requests]
    taken: list[EmbedInput] = []
    while inputs := take_inputs(pending, budget):
        taken += inputs
    for request in pending:
        assert [one.position for one in taken if one.request is request] == list(range(len(request.inputs)))


@given(REQUESTS, BUDGET)
def test_taking_stops_at_the_budget(requests: list[tuple[tuple[int, ...], ...]], budget: int) -> None:
    inputs = take_inputs([PendingRequest(inputs) for inputs in requests], budget)
    assert sum(len(one.tokens) for one in inputs[:-1]) < budget


def test_a_small_request_does_not_wait_for_a_large_one() -> None:
    large, small = PendingRequest(((1,) * 10,) * 1000), PendingRequest(((1,) * 10,))
    take_inputs([large], 100)
    inputs = take_inputs([large, small], 100)
    assert small in [one.request for one in inputs]


@given(REQUESTS, BUDGET)
def test_batches_hold_every_input_within_the_budget(requests: list[tuple[tuple[int, ...], ...]], budget: int) -> None:
    inputs = take_inputs([PendingRequest(inputs) for inputs in requests], 10_000)
    batches = make_batches(inputs, budget)
    assert sorted(map(id, (one for batch in batches for one in batch))) == sorted(map(id, inputs))
    for batch in batches:
        padded = len(batch) * max(len(one.tokens) for one in batch)
        assert padded <= budget or len(batch) == 1
    lengths = [len(batch[0].tokens) for batch in batches]
    assert lengths == sorted(lengths)


def test_a_request_is_complete_with_its_last_vector() -> None:
    request = PendingRequest(((1,), (2,)))
    assert not request.put(1, array("f", [2.0]))
    assert request.put(0, array("f", [1.0]))
    assert [vector[0] for vector in request.vectors] == [1.0, 2.0]
