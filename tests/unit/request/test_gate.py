"""The gate: admission, pause, draining, and the count of requests in flight."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import BatonError, Draining, Overloaded, Paused
from baton.request.cancel_scope import CancelScope
from baton.request.gate import Gate, GateState
from baton.testing import run_bounded


def test_the_gate_admits_no_more_than_its_limit() -> None:
    gate = Gate(2)
    first, second = CancelScope(), CancelScope()
    gate.enter(first)
    gate.enter(second)
    with pytest.raises(Overloaded, match="2 requests"):
        gate.enter(CancelScope())
    gate.leave(first)
    gate.enter(CancelScope())
    assert gate.in_flight == 2


def test_a_paused_gate_refuses_until_it_resumes() -> None:
    gate = Gate(2)
    inside = CancelScope()
    gate.enter(inside)
    gate.pause()
    with pytest.raises(Paused):
        gate.enter(CancelScope())
    assert gate.in_flight == 1
    gate.resume()
    gate.enter(CancelScope())


def test_draining_is_final() -> None:
    gate = Gate(2)
    gate.drain()
    gate.resume()
    gate.pause()
    assert gate.state is GateState.DRAINING
    with pytest.raises(Draining):
        gate.enter(CancelScope())


def test_resume_without_a_pause_changes_nothing() -> None:
    gate = Gate(1)
    gate.resume()
    assert gate.state is GateState.OPEN


def test_leave_of_a_refused_request_does_not_change_the_count() -> None:
    gate = Gate(1)
    gate.enter(CancelScope())
    refused = CancelScope()
    with pytest.raises(Overloaded):
        gate.enter(refused)
    gate.leave(refused)
    assert gate.in_flight == 1


def test_fire_all_reaches_every_request_even_if_they_leave_at_once() -> None:
    gate = Gate(3)
    scopes = [CancelScope() for _ in range(3)]
    for scope in scopes:
        gate.enter(scope)
        scope.on_fire(lambda error, scope=scope: gate.leave(scope))  # type: ignore[misc]
    gate.fire_all(Draining("bye"))
    assert all(isinstance(scope.error, Draining) for scope in scopes)
    assert gate.in_flight == 0


def test_idle_waits_for_the_last_request() -> None:
    async def body() -> None:
        gate = Gate(2)
        scope = CancelScope()
        gate.enter(scope)
        assert not await gate.idle(0.01)
        asyncio.get_running_loop().call_later(0.01, gate.leave, scope)
        assert await gate.idle(10.0)

    run_bounded(body())


@pytest.mark.parametrize("timeout_s", [0.0, 1.0])
def test_an_empty_gate_is_idle_at_once(timeout_s: float) -> None:
    async def body() -> None:
        gate = Gate(1)
        assert await gate.idle(timeout_s)
        scope = CancelScope()
        gate.enter(scope)
        gate.leave(scope)
        assert await gate.idle(timeout_s)

    run_bounded(body())


@given(st.lists(st.sampled_from(["enter", "leave", "pause", "resume"])), st.integers(1, 4))
def test_any_sequence_of_operations_keeps_the_count(moves: list[str], limit: int) -> None:
    gate = Gate(limit)
    inside: list[CancelScope] = []
    for move in moves:
        match move:
            case "enter":
                scope = CancelScope()
                if len(inside) == limit or gate.state is GateState.PAUSED:
                    with pytest.raises(BatonError):
                        gate.enter(scope)
                else:
                    gate.enter(scope)
                    inside.append(scope)
            case "leave" if inside:
                gate.leave(inside.pop())
            case "pause":
                gate.pause()
            case "resume":
                gate.resume()
        assert gate.in_flight == len(inside) <= limit
