"""The table of states: every walk through it is legal and ends once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.lifecycle import TERMINAL, TRANSITIONS, IllegalTransition, Lifecycle, State


@given(st.data())
def test_every_walk_ends_in_one_terminal_state(data: st.DataObject) -> None:
    lifecycle = Lifecycle()
    walked: list[State] = [lifecycle.state]
    while not lifecycle.ended:
        lifecycle.advance(data.draw(st.sampled_from(sorted(TRANSITIONS[lifecycle.state]))))
        walked.append(lifecycle.state)
    assert sum(state in TERMINAL for state in walked) == 1
    assert walked[-1] in TERMINAL
    assert len(walked) == len(set(walked))


@given(st.lists(st.sampled_from(State), max_size=12))
def test_an_illegal_transition_leaves_the_state_unchanged(moves: list[State]) -> None:
    lifecycle = Lifecycle()
    for move in moves:
        before = lifecycle.state
        try:
            lifecycle.advance(move)
        except IllegalTransition:
            assert move not in TRANSITIONS[before]
            assert lifecycle.state is before
        else:
            assert move in TRANSITIONS[before]
            assert lifecycle.state is move


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_a_terminal_state_has_no_exit(state: State) -> None:
    assert TRANSITIONS[state] == frozenset()


def test_the_table_has_every_state_and_names_no_other() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {after for moves in TRANSITIONS.values() for after in moves} <= set(State)


def test_terminal_states_are_the_five_endings() -> None:
    assert set(TERMINAL) == {State.COMPLETED, State.REFUSED, State.FAILED, State.CANCELLED, State.EXPIRED}


@pytest.mark.parametrize("state", [state for state in State if state not in TERMINAL])
def test_every_open_state_can_fail_be_cancelled_or_expire(state: State) -> None:
    assert {State.FAILED, State.CANCELLED, State.EXPIRED} <= TRANSITIONS[state]


def test_submitted_work_cannot_be_refused() -> None:
    assert State.REFUSED not in TRANSITIONS[State.SUBMITTED]
    assert State.REFUSED not in TRANSITIONS[State.STREAMING]


def test_an_illegal_transition_names_both_states() -> None:
    with pytest.raises(IllegalTransition, match="received -> completed"):
        Lifecycle().advance(State.COMPLETED)
