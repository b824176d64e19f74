"""Forwarding: selection, retries, cancellation, and requests and streams that arrive unchanged."""

import asyncio
import copy
from contextlib import aclosing

import msgspec
import pytest

from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Draining,
    EngineDead,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    PeerLost,
)
from baton.ports.runtime import Wire
from baton.protocol.lifecycle import State
from baton.router.grid import Grid
from baton.router.plan import Aggregated, Plan, Retry
from baton.testing import eventually, run_bounded
from baton.testing.memory_runtime import MemoryContext
from tests.unit.router.router_pools import LAST, REQUEST, Fleet

LONG: Wire = {"token_ids": list(range(15))}
ERROR_CHUNK: Wire = {"token_ids": [], "index": 0, "finish_reason": {"error": "broken"}}


def test_d32_request_and_stream_are_forwarded_unchanged() -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        request = copy.deepcopy(REQUEST)
        assert await fleet.send(request) == [{"token_ids": [5], "index": 0}, LAST]
        assert fleet.pools["fast"].requests == [REQUEST]
        assert request == REQUEST

    run_bounded(body())


def test_grid_selects_a_pool_and_a_priority_overrides_it() -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        await fleet.send()
        await fleet.send(LONG)
        await fleet.send({**LONG, "routing": {"priority": 8}})
        assert [len(pool.requests) for pool in fleet.pools.values()] == [2, 1]
        assert fleet.metric("baton_router_decisions_total", pool="slow", reason="grid") == 1
        assert fleet.metric("baton_router_decisions_total", pool="fast", reason="override") == 1

    run_bounded(body())


@pytest.mark.parametrize("failure", [PeerLost("gone"), Overloaded("full"), Draining("leaving"), EngineDead("dead")])
def test_d31_failure_before_the_first_output_is_retried_in_the_next_pool(failure: BatonError) -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        fleet.pools["slow"].replies = [failure]
        assert (await fleet.send(LONG))[-1] == LAST
        assert len(fleet.pools["fast"].requests) == 1
        assert fleet.metric("baton_router_retries_total", pool="slow", code=failure.code) == 1
        assert fleet.metric("baton_router_decisions_total", pool="fast", reason="retry") == 1
        assert fleet.observer.records[-1].state is State.COMPLETED

    run_bounded(body())


def test_stream_without_output_is_retried_in_the_next_pool() -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        fleet.pools["slow"].replies = []
        assert (await fleet.send(LONG))[-1] == LAST

    run_bounded(body())


@pytest.mark.parametrize("failure", [PeerLost("gone"), ERROR_CHUNK])
def test_failure_after_the_first_output_is_not_retried(failure: BatonError | Wire) -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        fleet.pools["slow"].replies = [{"token_ids": [5], "index": 0}, failure]
        if isinstance(failure, BatonError):
            with pytest.raises(PeerLost):
                await fleet.send(LONG)
        else:
            assert (await fleet.send(LONG))[-1] == failure
        assert fleet.pools["fast"].requests == []

    run_bounded(body())


@pytest.mark.parametrize("failure", [InvalidRequest("bad"), Cancelled("left"), EngineFailed("no"), ERROR_CHUNK])
def test_a_request_that_would_fail_in_every_pool_is_not_retried(failure: BatonError | Wire) -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        fleet.pools["slow"].replies = [failure]
        with pytest.raises(type(failure) if isinstance(failure, BatonError) else EngineFailed):
            await fleet.send(LONG)
        assert fleet.pools["fast"].requests == []
        assert fleet.metric("baton_router_retries_total", pool="slow", code="engine_failed") == 0

    run_bounded(body())


def test_last_error_is_raised_when_every_pool_fails() -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        fleet.pools["slow"].replies, fleet.pools["fast"].replies = [PeerLost("first")], [EngineFailed("second")]
        with pytest.raises(EngineFailed, match="second"):
            await fleet.send(LONG)

    run_bounded(body())


def test_slower_pools_are_tried_only_if_the_plan_allows_it() -> None:
    async def body() -> None:
        for others in (False, True):
            fleet = Fleet("fast", "slow")
            await fleet.open(fleet.plan(Retry(faster=True, others=others)))
            fleet.pools["fast"].replies = [PeerLost("gone")]
            if others:
                assert (await fleet.send())[-1] == LAST
            else:
                with pytest.raises(PeerLost):
                    await fleet.send()

    run_bounded(body())


def test_d31_cancellation_ends_the_request_in_its_pool_without_a_retry() -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        fleet.pools["slow"].replies = [asyncio.Event().wait]
        context = MemoryContext("r")
        sending = asyncio.create_task(fleet.send(LONG, context))
        await eventually(lambda: len(fleet.pools["slow"].requests) == 1)
        context.cancel()
        with pytest.raises(Cancelled):
            await sending
        assert fleet.pools["slow"].cancelled == 1
        assert fleet.pools["fast"].requests == []
        assert fleet.observer.records[-1].state is State.CANCELLED

    run_bounded(body())


def test_d31_trace_headers_are_forwarded_to_the_pool() -> None:
    async def body() -> None:
        fleet = await Fleet("fast").open()
        headers = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "x-request-id": "mine"}
        await fleet.send(context=MemoryContext("r", headers))
        assert fleet.pools["fast"].contexts[0].trace_headers == headers

    run_bounded(body())


def test_request_timeout_cancels_the_request_in_its_pool() -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow", request_timeout_s=0.05).open()
        fleet.pools["slow"].replies = [{"token_ids": [5], "index": 0}, asyncio.Event().wait]
        with pytest.raises(DeadlineExceeded):
            await fleet.send(LONG)
        await eventually(lambda: fleet.pools["slow"].cancelled == 1)
        assert fleet.pools["fast"].requests == []

    run_bounded(body())


def test_d31_pool_without_workers_is_skipped() -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        await fleet.endpoints["slow"].deregister()
        await fleet.send(LONG)
        assert len(fleet.pools["fast"].requests) == 1
        assert fleet.metric("baton_router_skipped_pools_total", pool="slow", reason="empty") == 1
        assert fleet.metric("baton_router_decisions_total", pool="fast", reason="fallback") == 1
        await fleet.endpoints["fast"].deregister()
        with pytest.raises(PeerLost, match=r"slow \(no worker\), fast \(no worker\)"):
            await fleet.send(LONG)

    run_bounded(body())


def test_d31_pool_at_its_queue_limit_is_skipped_until_its_requests_have_output() -> None:
    async def body() -> None:
        fleet = Fleet("fast", "slow")
        await fleet.open(fleet.plan(queue_limit=1))
        go = asyncio.Event()
        fleet.pools["slow"].replies = fleet.pools["fast"].replies = [go.wait, LAST]
        waiting = [asyncio.create_task(fleet.send(LONG)) for _ in range(2)]
        await eventually(lambda: [len(pool.requests) for pool in fleet.pools.values()] == [1, 1])
        with pytest.raises(Overloaded, match=r"slow \(queue full\), fast \(queue full\)"):
            await fleet.send(LONG)
        go.set()
        await asyncio.gather(*waiting)
        assert (await fleet.send(LONG)) == [LAST]
        assert fleet.metric("baton_router_pool_waiting_requests", pool="slow") == 0
        assert fleet.metric("baton_router_pool_requests_in_flight", pool="slow") == 0

    run_bounded(body())


ROOM: Wire = {"token_ids": [], "index": 0, "disaggregated_params": {"bootstrap_room": 7}}


def test_a_request_whose_room_is_known_before_it_is_computed_waits_until_it_has_output() -> None:
    async def body() -> None:
        fleet = Fleet("fast")
        await fleet.open(fleet.plan(queue_limit=1))
        go = asyncio.Event()
        fleet.pools["fast"].replies = [ROOM, go.wait, LAST]
        context = MemoryContext("r")
        async with aclosing(fleet.forwarder.generate(REQUEST, context)) as replies:
            assert await anext(replies) == ROOM
            assert fleet.metric("baton_router_pool_waiting_requests", pool="fast") == 1
            with pytest.raises(Overloaded, match="queue full"):
                await fleet.send()
            asyncio.get_running_loop().call_later(0.1, go.set)
            assert [reply async for reply in replies] == [LAST]
        assert fleet.metric("baton_router_pool_waiting_requests", pool="fast") == 0
        assert fleet.metric("baton_router_latency_seconds_sum", pool="fast", kind="ttft") >= 0.1
        record = fleet.observer.records[-1]
        assert record.first_output_s is not None
        assert record.first_output_s >= 0.1

    run_bounded(body())


def test_a_pool_that_fails_after_the_room_is_known_is_not_tried_again() -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        fleet.pools["slow"].replies = [ROOM, PeerLost("gone")]
        with pytest.raises(PeerLost):
            await fleet.send(LONG)
        assert fleet.pools["fast"].requests == []
        assert fleet.metric("baton_router_pool_waiting_requests", pool="slow") == 0

    run_bounded(body())


def test_an_answer_without_tokens_has_no_latency() -> None:
    async def body() -> None:
        fleet = await Fleet("fast").open()
        fleet.pools["fast"].replies = [ROOM]
        assert await fleet.send() == [ROOM]
        assert fleet.metric("baton_router_latency_seconds_count", pool="fast", kind="ttft") == 0
        assert fleet.metric("baton_router_pool_waiting_requests", pool="fast") == 0

    run_bounded(body())


@pytest.mark.parametrize("adaptive", [False, True])
def test_d31_pool_that_misses_the_target_is_skipped_if_adaptive(adaptive: bool) -> None:
    async def body() -> None:
        fleet = Fleet("fast", "slow")
        await fleet.open(fleet.plan(adaptive=adaptive))
        slow = fleet.pools["slow"]
        slow.replies = [lambda: asyncio.sleep(0.3), *slow.replies]
        await asyncio.gather(*(fleet.send(LONG) for _ in range(10)))
        assert [len(pool.requests) for pool in fleet.pools.values()] == [0, 10]
        await fleet.send({**LONG, "router": {"ttft_target": 100}})
        assert [len(pool.requests) for pool in fleet.pools.values()] == ([1, 10] if adaptive else [0, 11])
        await fleet.send({**LONG, "router": {"ttft_target": 60_000}})
        assert len(slow.requests) == (11 if adaptive else 12)
        assert fleet.metric("baton_router_skipped_pools_total", pool="slow", reason="slow") == adaptive
        assert fleet.metric("baton_router_pool_meets_target", pool="slow", kind="ttft") == 1

    run_bounded(body())


def test_latency_is_recorded_with_its_ratio_to_the_target() -> None:
    async def body() -> None:
        fleet = await Fleet("fast").open()
        fleet.pools["fast"].replies = [
            {"token_ids": [5], "index": 0},
            lambda: asyncio.sleep(0.02),
            {"token_ids": [6, 7], "index": 0},
        ]
        await fleet.send({**REQUEST, "router": {"ttft_target": 10_000}})
        assert fleet.metric("baton_router_latency_seconds_count", pool="fast", kind="ttft") == 1
        assert fleet.metric("baton_router_latency_seconds_sum", pool="fast", kind="itl") >= 0.01
        assert fleet.metric("baton_router_target_ratio_bucket", pool="fast", kind="ttft", le="0.5") == 1
        assert fleet.observer.records[-1].completion_tokens == 3

    run_bounded(body())


def test_new_plan_keeps_the_state_of_its_pools() -> None:
    async def body() -> None:
        fleet = await Fleet("fast", "slow").open()
        before = list(fleet.routing.router("aggregated").states)
        await fleet.routing.adopt(fleet.plan(queue_limit=3))
        after = fleet.routing.router("aggregated").states
        assert [new is old for new, old in zip(after, before, strict=True)] == [True, True]
        assert after[0].pool.queue_limit == 3
        alone = fleet.plan()
        role_plan = msgspec.structs.replace(alone.roles["aggregated"], pools=alone.roles["aggregated"].pools[:1])
        grid = Grid((), (0,))
        await fleet.routing.adopt(Plan(mode=Aggregated(msgspec.structs.replace(role_plan, grid=grid))))
        await fleet.routing.adopt(fleet.plan())
        assert fleet.routing.router("aggregated").states[1] is before[1], "a pool that is added again keeps its state"

    run_bounded(body())
