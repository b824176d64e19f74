"""Forwarding: what is sent where, what is tried again, and what nobody may change or lose."""

import asyncio
import copy

import msgspec
import pytest

from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    PeerLost,
)
from baton.ports.runtime import Wire
from baton.protocol.lifecycle import State
from baton.router.grid import Grid
from baton.router.plan import Aggregated, Plan, Retry
from baton.router.request_view import read_ask
from baton.testing import eventually, run_bounded
from baton.testing.memory_runtime import MemoryContext
from tests.unit.router.router_pools import LAST, REQUEST, Fleet

LONG: Wire = {"token_ids": list(range(15))}
ERROR_CHUNK: Wire = {"token_ids": [], "index": 0, "finish_reason": {"error": "broken"}}


def test_d32_nothing_of_a_request_or_its_stream_is_lost_or_changed() -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        request = copy.deepcopy(REQUEST)
        assert await fleet.ask(request) == [{"token_ids": [5], "index": 0}, LAST]
        assert fleet.pools["fast"].requests == [REQUEST]
        assert request == REQUEST

    run_bounded(body())


def test_the_grid_chooses_and_a_priority_overrides_it() -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        await fleet.ask()
        await fleet.ask(LONG)
        await fleet.ask({**LONG, "routing": {"priority": 8}})
        assert [len(pool.requests) for pool in fleet.pools.values()] == [2, 1]
        assert fleet.metric("baton_router_decisions_total", pool="slow", reason="grid") == 1
        assert fleet.metric("baton_router_decisions_total", pool="fast", reason="override") == 1

    run_bounded(body())


@pytest.mark.parametrize("failure", [PeerLost("gone"), EngineFailed("no"), Overloaded("full"), ERROR_CHUNK])
def test_d31_what_fails_before_its_first_output_goes_to_the_next_pool(failure: BatonError | Wire) -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        fleet.pools["slow"].answer = [failure]
        assert (await fleet.ask(LONG))[-1] == LAST
        assert len(fleet.pools["fast"].requests) == 1
        code = failure.code if isinstance(failure, BatonError) else "engine_failed"
        assert fleet.metric("baton_router_retries_total", pool="slow", code=code) == 1
        assert fleet.metric("baton_router_decisions_total", pool="fast", reason="retry") == 1
        assert fleet.observer.records[-1].state is State.COMPLETED

    run_bounded(body())


def test_a_stream_that_ends_without_a_word_goes_to_the_next_pool() -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        fleet.pools["slow"].answer = []
        assert (await fleet.ask(LONG))[-1] == LAST

    run_bounded(body())


@pytest.mark.parametrize("failure", [PeerLost("gone"), ERROR_CHUNK])
def test_what_fails_after_its_first_output_is_not_tried_again(failure: BatonError | Wire) -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        fleet.pools["slow"].answer = [{"token_ids": [5], "index": 0}, failure]
        if isinstance(failure, BatonError):
            with pytest.raises(PeerLost):
                await fleet.ask(LONG)
        else:
            assert (await fleet.ask(LONG))[-1] == failure
        assert fleet.pools["fast"].requests == []

    run_bounded(body())


@pytest.mark.parametrize("failure", [InvalidRequest("bad"), Cancelled("left")])
def test_what_would_fail_anywhere_is_not_tried_again(failure: BatonError) -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        fleet.pools["slow"].answer = [failure]
        with pytest.raises(type(failure)):
            await fleet.ask(LONG)
        assert fleet.pools["fast"].requests == []

    run_bounded(body())


def test_when_every_pool_fails_the_last_failure_is_told() -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        fleet.pools["slow"].answer, fleet.pools["fast"].answer = [PeerLost("first")], [EngineFailed("second")]
        with pytest.raises(EngineFailed, match="second"):
            await fleet.ask(LONG)

    run_bounded(body())


def test_slower_pools_are_tried_only_when_the_plan_says_so() -> None:
    async def body() -> None:
        for others in (False, True):
            fleet = Fleet("fast", "slow")
            await fleet.open(fleet.plan(Retry(faster=True, others=others)))
            fleet.pools["fast"].answer = [PeerLost("gone")]
            if others:
                assert (await fleet.ask())[-1] == LAST
            else:
                with pytest.raises(PeerLost):
                    await fleet.ask()

    run_bounded(body())


def test_d31_a_client_that_leaves_ends_the_request_in_its_pool_and_no_other_is_tried() -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        fleet.pools["slow"].answer = [asyncio.Event().wait]
        context = MemoryContext("r")
        asking = asyncio.create_task(fleet.ask(LONG, context))
        await eventually(lambda: len(fleet.pools["slow"].requests) == 1)
        context.cancel()
        with pytest.raises(Cancelled):
            await asking
        assert fleet.pools["slow"].left == 1
        assert fleet.pools["fast"].requests == []
        assert fleet.observer.records[-1].state is State.CANCELLED

    run_bounded(body())


def test_d31_the_trace_goes_on_to_the_pool() -> None:
    async def body() -> None:
        fleet = await Fleet("fast").open()
        headers = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "x-request-id": "mine"}
        await fleet.ask(context=MemoryContext("r", headers))
        assert fleet.pools["fast"].contexts[0].trace_headers == headers

    run_bounded(body())


def test_a_request_that_takes_too_long_is_ended_in_its_pool() -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow", request_timeout_s=0.05).open()
        fleet.pools["slow"].answer = [{"token_ids": [5], "index": 0}, asyncio.Event().wait]
        with pytest.raises(DeadlineExceeded):
            await fleet.ask(LONG)
        await eventually(lambda: fleet.pools["slow"].left == 1)
        assert fleet.pools["fast"].requests == []

    run_bounded(body())


def test_d31_a_pool_without_workers_is_passed_over() -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        await fleet.endpoints["slow"].deregister()
        await fleet.ask(LONG)
        assert len(fleet.pools["fast"].requests) == 1
        assert fleet.metric("baton_router_skipped_total", pool="slow", reason="empty") == 1
        assert fleet.metric("baton_router_decisions_total", pool="fast", reason="fallback") == 1
        await fleet.endpoints["fast"].deregister()
        with pytest.raises(PeerLost, match=r"slow \(no worker\), fast \(no worker\)"):
            await fleet.ask(LONG)

    run_bounded(body())


def test_d31_a_pool_over_its_queue_limit_is_passed_over_until_outputs_come() -> None:
    async def body() -> None:
        fleet = Fleet("fast", "slow")
        await fleet.open(fleet.plan(queue_limit=1))
        go = asyncio.Event()
        fleet.pools["slow"].answer = fleet.pools["fast"].answer = [go.wait, LAST]
        waiting = [asyncio.create_task(fleet.ask(LONG)) for _ in range(2)]
        await eventually(lambda: [len(pool.requests) for pool in fleet.pools.values()] == [1, 1])
        with pytest.raises(Overloaded, match=r"slow \(full\), fast \(full\)"):
            await fleet.ask(LONG)
        go.set()
        await asyncio.gather(*waiting)
        assert (await fleet.ask(LONG)) == [LAST]
        assert fleet.metric("baton_router_pool_waiting", pool="slow") == 0
        assert fleet.metric("baton_router_pool_in_flight", pool="slow") == 0

    run_bounded(body())


@pytest.mark.parametrize("adaptive", [False, True])
def test_d31_a_pool_that_is_slower_than_asked_is_passed_over_when_adaptive(adaptive: bool) -> None:
    async def body() -> None:
        fleet = Fleet("fast", "slow")
        await fleet.open(fleet.plan(adaptive=adaptive))
        for _ in range(10):
            fleet.routes.part("aggregated").states[1].windows["ttft_ms"].add(200.0)
        await fleet.ask({**LONG, "router": {"ttft_target": 100}})
        assert [len(pool.requests) for pool in fleet.pools.values()] == ([1, 0] if adaptive else [0, 1])
        await fleet.ask({**LONG, "router": {"ttft_target": 300}})
        assert len(fleet.pools["slow"].requests) == (1 if adaptive else 2)
        assert fleet.metric("baton_router_skipped_total", pool="slow", reason="slow") == adaptive
        assert fleet.metric("baton_router_pool_meets", pool="slow", kind="ttft") == 1

    run_bounded(body())


def test_latency_is_measured_against_its_target() -> None:
    async def body() -> None:
        fleet = await Fleet("fast").open()
        fleet.pools["fast"].answer = [
            {"token_ids": [5], "index": 0},
            lambda: asyncio.sleep(0.02),
            {"token_ids": [6, 7], "index": 0},
        ]
        await fleet.ask({**REQUEST, "router": {"ttft_target": 10_000}})
        assert fleet.metric("baton_router_latency_seconds_count", pool="fast", kind="ttft") == 1
        assert fleet.metric("baton_router_latency_seconds_sum", pool="fast", kind="itl") >= 0.01
        assert fleet.metric("baton_router_target_ratio_bucket", pool="fast", kind="ttft", le="0.5") == 1
        assert fleet.observer.records[-1].completion_tokens == 3

    run_bounded(body())


def test_a_new_plan_keeps_what_is_known_of_pools_that_stay() -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        before = list(fleet.routes.part("aggregated").states)
        await fleet.routes.adopt(fleet.plan(queue_limit=3))
        after = fleet.routes.part("aggregated").states
        assert [new is old for new, old in zip(after, before, strict=True)] == [True, True]
        assert after[0].pool.queue_limit == 3
        alone = fleet.plan()
        part = msgspec.structs.replace(alone.parts["aggregated"], pools=alone.parts["aggregated"].pools[:1])
        grid = Grid((), (0,))
        await fleet.routes.adopt(Plan(mode=Aggregated(msgspec.structs.replace(part, grid=grid))))
        await fleet.routes.adopt(fleet.plan())
        assert fleet.routes.part("aggregated").states[1] is before[1], "a pool that comes back is the same"

    run_bounded(body())


def test_d33_the_context_counts_what_may_still_be_generated() -> None:
    assert read_ask({"token_ids": [1, 2], "stop_conditions": {"max_tokens": 10}}).point.context == 12
    expected = {"token_ids": [1, 2], "stop_conditions": {"max_tokens": 10}, "routing": {"expected_output_tokens": 4}}
    assert read_ask(expected).point.context == 6
    assert read_ask({"token_ids": [1, 2]}).point.context == 2


def test_targets_come_from_the_request_or_else_from_the_plan_and_zero_is_one() -> None:
    assert read_ask({"router": {"ttft_target": 0}}, 5, 6).point.ttft_ms == 0
    assert read_ask({"router": {"ttft_target": None}}, 5, 6).point.ttft_ms == 5
    assert read_ask({"extra_args": {"itl_target": 7}}, 5, 6).point.itl_ms == 7
    assert read_ask({}).point.itl_ms is None


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        ({"router": 3}, "router: expected an object, got int"),
        ({"router": {"ttft_target": "fast"}}, "router.ttft_target: expected milliseconds, 0 or more, got 'fast'"),
        ({"router": {"itl_target": -1}}, "router.itl_target: expected milliseconds"),
        ({"router": {"itl_target": float("nan")}}, "router.itl_target: expected milliseconds"),
        ({"routing": {"priority": 1.5}}, "routing.priority: expected a whole number, got 1.5"),
        ({"stop_conditions": {"max_tokens": True}}, "stop_conditions.max_tokens: expected a whole number, got True"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_by_name(request_: Wire, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        read_ask(request_)
