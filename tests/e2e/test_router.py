"""The global router with real processes: where requests go, and what becomes of them when pools fail."""

import asyncio
import copy
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.router.grid import Point
from baton.router.plan import RolePlan
from baton.router.request_view import RequestView
from baton.router.select import select_pool
from baton.router.topology_file import read_topology
from tests.e2e.harness import assert_unbroken, eventually
from tests.e2e.pooled import ROUTER, Pooled

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CHAT = "/v1/chat/completions"
NEAR, FAR = 1, 2  # the workers of the pools, by their system ports
ECHO: dict[str, Any] = {
    "mode": "aggregated",
    "settings": {
        "engine": "echo",
        "name": ["echo", "other"],
        "echo": {"pace_ms": 5, "faults": True},
        "tool_call_parser": "hermes",
    },
    "retry": {"faster": True, "others": True},
    "aggregated": {
        "pools": [{"name": "near", "workers": {"count": 1}}, {"name": "far", "workers": {"count": 1}}],
        "axes": [
            {"name": "length", "min": 0, "max": 100, "buckets": 2},
            {"name": "ttft_ms", "min": 0, "max": 1000, "buckets": 2},
            {"name": "itl_ms", "min": 0, "max": 100, "buckets": 2},
        ],
        "mapping": [[["near", "far"], ["far", "far"]], [["far", "near"], ["near", "near"]]],
        "overrides": [{"min": 5, "max": 9, "pool": "far"}],
    },
}


def changed(topology: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return {**copy.deepcopy(topology), **parts}


def chat(prompt: str, tokens: int = 4, **more: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, **more}


@pytest.fixture(scope="module")
def echo(start_shared: Callable[..., Pooled]) -> Iterator[Pooled]:
    pooled = start_shared(Pooled, ECHO, workers=2)
    yield pooled
    pooled.stop()


def test_tool_calls_of_pooled_workers_are_parsed(echo: Pooled) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    (choice,) = echo.client().chat.completions.create(**chat(call, len(call), tools=tools)).choices
    assert [(made.function.name, made.function.arguments) for made in choice.message.tool_calls or []] == [
        ("look", '{"at": "it"}')
    ]


def expected(plan: RolePlan, request: RequestView) -> str:
    return plan.pools[select_pool(plan, request.point, request.priority).pool].name


@pytest.mark.slow
def test_a_thousand_mixed_requests_land_where_the_rules_say(echo: Pooled) -> None:
    plan = read_topology(echo.file, "baton").plan.roles["aggregated"]
    before = echo.decisions("aggregated")
    draw = random.Random(7)
    wanted: dict[str, int] = {}

    def one() -> dict[str, Any]:
        length, tokens = draw.randrange(1, 120), draw.randrange(1, 4)
        ttft, itl = draw.choice([None, 0, 100, 499, 500, 2000]), draw.choice([None, 0, 20, 50, 500])
        priority = draw.choice([None, None, 0, 5, 9, 10])
        targets = {"ttft_target": ttft, "itl_target": itl}
        router = {name: value for name, value in targets.items() if value is not None}
        point = Point(length=length, context=length + tokens, ttft_ms=ttft, itl_ms=itl)
        pool = expected(plan, RequestView(point, priority))
        wanted[pool] = wanted.get(pool, 0) + 1
        hints = {"agent_hints": {"priority": priority}} if priority is not None else {}
        return chat("x" * length, tokens, extra_body={"nvext": {"router": router, **hints}})

    bodies = [one() for _ in range(1000)]

    async def run() -> list[str]:
        async with echo.async_client() as client:
            limit = asyncio.Semaphore(32)

            async def send(body: dict[str, Any]) -> str:
                async with limit:
                    answer = await client.chat.completions.create(**body)
                return answer.choices[0].message.content or ""

            return await asyncio.gather(*(send(body) for body in bodies))

    texts = asyncio.run(run())
    assert texts == ["x" * body["max_tokens"] for body in bodies]
    after = echo.decisions("aggregated")
    assert {pool: after[pool] - before.get(pool, 0) for pool in after} == wanted
    assert min(wanted.values()) > 100


def test_no_process_of_any_pool_listens_for_other_hosts(echo: Pooled) -> None:
    echo.assert_unexposed()


def test_clients_see_the_model_once_and_reach_no_worker_but_through_the_router(echo: Pooled) -> None:
    assert sorted(echo.models()) == ["echo", "other"]
    before, ended = (
        sum(echo.decisions("aggregated").values()),
        echo.ended("completed", NEAR) + echo.ended("completed", FAR),
    )
    for name in ["echo", "other"] * 10:
        assert echo.post(CHAT, {**chat("hello"), "model": name})[0] == 200
    assert sum(echo.decisions("aggregated").values()) == before + 20
    assert echo.ended("completed", NEAR) + echo.ended("completed", FAR) == ended + 20


def test_a_request_that_its_engine_fails_is_tried_once(echo: Pooled) -> None:
    def failed() -> list[float]:
        return [echo.ended("failed", worker) for worker in (NEAR, FAR)]

    before, decisions = failed(), sum(echo.decisions("aggregated").values())
    assert echo.post(CHAT, chat("[[fail]] please"))[0] == 500
    assert sum(failed()) == sum(before) + 1
    assert sum(echo.decisions("aggregated").values()) == decisions + 1


def test_d31_a_client_that_leaves_is_gone_from_the_engine_within_a_second_or_so(echo: Pooled) -> None:
    connection = echo.open(CHAT, chat("hello", 100_000, stream=True))
    eventually(lambda: echo.load(NEAR)["running"] + echo.load(FAR)["running"] == 1, what="it runs")
    connection.close()
    began = time.monotonic()
    eventually(lambda: not any([*echo.load(NEAR).values(), *echo.load(FAR).values()]), 5.0, "it is gone")
    print(f"gone after {time.monotonic() - began:.3f} s")
    eventually(lambda: echo.metric("baton_router_pool_requests_in_flight", ROUTER) == 0, what="the router forgets it")


def test_d31_one_trace_goes_through_every_hop(start: Callable[..., Pooled]) -> None:
    pooled = start(Pooled, changed(ECHO), workers=2, arguments=["--log-level", "debug"])
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "x-request-id": "client-7"}
    assert pooled.post(CHAT, chat("hello"), headers)[0] == 200

    def lines(name: str) -> list[str]:
        return [line for line in pooled.log_of(name).splitlines() if f"trace={trace_id} client=client-7" in line]

    eventually(lambda: len(lines("router")) == 1, what="the line of the router")
    eventually(lambda: len(lines("near-0") + lines("far-0")) == 1, what="the line of the worker")
    assert " aggregated completed " in lines("router")[0]
    assert "routed to pool" in pooled.log_of("router")
    pooled.stop()


@pytest.mark.slow
def test_an_adaptive_router_skips_a_pool_that_is_slow(start: Callable[..., Pooled]) -> None:
    slow = {"name": "slow", "workers": {"count": 1, "settings": {"echo": {"prefill_ms": 3000}}}}
    topology: dict[str, Any] = {
        "mode": "aggregated",
        "adaptive": True,
        "retry": {"others": True},
        "settings": {"engine": "echo"},
        "aggregated": {
            "pools": [slow, {"name": "quick", "workers": {"count": 1}}],
            "axes": [{"name": "ttft_ms", "min": 0, "max": 2000, "buckets": 1}],
            "mapping": ["slow"],
        },
    }
    pooled = start(Pooled, topology, workers=2)

    def skipped() -> bool:
        """Whether the next request goes to the other pool: the router refreshes its measurements now and then."""
        before = pooled.decisions("aggregated").get("quick", 0)
        assert pooled.post(CHAT, chat("hello"))[0] == 200
        return pooled.decisions("aggregated").get("quick", 0) == before + 1

    # Until enough requests have been slow, nothing is known of the pool that the grid selects.
    assert len(pooled.answers(chat("hello"), 8, 0.0, {})) == 8
    assert pooled.decisions("aggregated") == {"slow": 8 + 1}  # with the first request of `baton serve`
    eventually(skipped, 60, "the slow pool is skipped")
    assert pooled.metric("baton_router_skipped_pools_total", ROUTER, pool="slow", reason="slow") >= 1
    # A request that accepts the delay still goes where the grid sends it.
    before = pooled.decisions("aggregated")["slow"]
    patient = chat("hello", nvext={"router": {"ttft_target": 100_000}})
    assert pooled.post(CHAT, patient)[0] == 200
    assert pooled.decisions("aggregated")["slow"] == before + 1
    pooled.write(changed(topology, adaptive=False))
    eventually(lambda: pooled.metric("baton_router_reloads_total", ROUTER, outcome="adopted") == 1, what="the plan")
    assert pooled.post(CHAT, chat("hello"))[0] == 200
    assert pooled.decisions("aggregated")["slow"] == before + 2
    pooled.stop()


@pytest.mark.faults
def test_requests_of_a_pool_that_dies_are_served_by_another(start: Callable[..., Pooled]) -> None:
    pooled = start(Pooled, changed(ECHO), workers=2)

    # Without a target a short prompt is far's. Who was in the middle of an answer goes on elsewhere, from there.
    texts = pooled.answers(chat("abcde", 20), 100, 0.03, {1.0: lambda: pooled.worker(FAR).kill()})
    assert len(texts) == 100
    for text in texts:
        assert_unbroken(text, "abcde", 20)
    assert pooled.decisions("aggregated")["near"] > 0
    # The supervisor starts another; then the rules hold again.
    eventually(lambda: pooled.health(FAR) == 200, 60, "the worker is back")
    eventually(lambda: pooled.metric("baton_router_pool_workers", ROUTER, pool="far") == 1, 30, "the pool is back")
    before = pooled.decisions("aggregated")
    assert pooled.post(CHAT, chat("hello"))[0] == 200
    assert pooled.decisions("aggregated")["far"] == before["far"] + 1
    pooled.stop()


@pytest.mark.faults
def test_a_worker_that_is_frozen_holds_up_its_own_requests_only(start: Callable[..., Pooled]) -> None:
    pooled = start(Pooled, changed(ECHO), workers=2, arguments=["--request-timeout-s", "4"])
    far = pooled.worker(FAR)
    far.suspend()
    try:
        status, text = pooled.post(CHAT, chat("hello"))
        assert status in (503, 504), text
        assert pooled.post(CHAT, chat("hello", nvext={"router": {"ttft_target": 0, "itl_target": 0}}))[0] == 200
        eventually(
            lambda: pooled.metric("baton_router_pool_requests_in_flight", ROUTER) == 0, 15, "the router holds nothing"
        )
    finally:
        far.resume()
    pooled.stop()


def test_a_plan_that_changes_under_load_loses_nothing(start: Callable[..., Pooled]) -> None:
    pooled = start(Pooled, changed(ECHO), workers=2)
    swapped = json.loads(json.dumps(ECHO).replace("near", "tmp").replace("far", "near").replace("tmp", "far"))
    # Pools are who they are by name: only the mapping is swapped.
    swapped["aggregated"]["pools"] = ECHO["aggregated"]["pools"]
    broken = changed(ECHO, aggregated={**ECHO["aggregated"], "mapping": [["near"]]})

    async def run() -> list[str]:
        async with pooled.async_client() as client:
            done = asyncio.Event()

            async def send() -> list[str]:
                texts = []
                while not done.is_set():
                    answer = await client.chat.completions.create(**chat("hello", 20))
                    texts.append(answer.choices[0].message.content or "")
                return texts

            sending = [asyncio.create_task(send()) for _ in range(8)]
            for topology, outcome, count in ((swapped, "adopted", 1), (broken, "refused", 1), (ECHO, "adopted", 2)):
                await asyncio.to_thread(pooled.write, topology)
                await asyncio.to_thread(_until_counted, pooled, outcome, count)
            done.set()
            return list(itertools.chain(*await asyncio.gather(*sending)))

    texts = asyncio.run(run())
    assert len(texts) > 20
    assert set(texts) == {"hellohellohellohello"}
    assert "is refused" in pooled.log_of("router")
    assert "aggregated.mapping: has 1 entry, length has 2 buckets" in pooled.log_of("router")
    assert min(pooled.decisions("aggregated").values()) > 0
    pooled.stop()


def _until_counted(pooled: Pooled, outcome: str, count: int) -> None:
    eventually(
        lambda: pooled.metric("baton_router_reloads_total", ROUTER, outcome=outcome) == count,
        what=f"a plan is {outcome}",
    )


@pytest.mark.slow
def test_a_full_pool_is_passed_over_and_when_all_are_full_clients_hear_503(start: Callable[..., Pooled]) -> None:
    topology = changed(ECHO, settings={"engine": "echo", "echo": {"prefill_ms": 3000}})
    for pool in topology["aggregated"]["pools"]:
        pool["queue_limit"] = 1
    pooled = start(Pooled, topology, workers=2, arguments=["--migrations", "0"])

    async def run() -> list[int]:
        async with pooled.async_client() as client:

            async def send() -> int:
                answer = await client.chat.completions.with_raw_response.create(**chat("hello"))
                return answer.status_code

            results = await asyncio.gather(*(send() for _ in range(3)), return_exceptions=True)
        return sorted(getattr(result, "status_code", result) for result in results)  # type: ignore[type-var]

    assert asyncio.run(run()) == [200, 200, 503]
    assert pooled.metric("baton_router_skipped_pools_total", ROUTER, reason="queue") >= 2
    pooled.stop()


def test_bad_targets_are_refused_with_their_names(echo: Pooled) -> None:
    status, text = echo.post(CHAT, chat("hello", nvext={"router": {"ttft_target": -5}}))
    assert status == 400
    assert "ttft_target" in text


def test_an_example_is_shipped_and_is_valid() -> None:
    file = Path(__file__).parents[2] / "examples" / "two-pools.yaml"
    topology = read_topology(file, "baton")
    assert [(group.role, group.pool, group.count) for group in topology.groups] == [
        ("prefill", "quick", 1),
        ("prefill", "bulk", 1),
        ("decode", "few", 1),
        ("decode", "many", 1),
    ]


@pytest.mark.faults
def test_a_router_that_was_frozen_until_discovery_forgot_it_comes_back(start: Callable[..., Pooled]) -> None:
    pooled = start(Pooled, changed(ECHO), workers=2)
    router = pooled.router()
    router.suspend()
    try:
        eventually(lambda: pooled.models() == [], 30, "discovery has forgotten it")
    finally:
        router.resume()
    eventually(lambda: pooled.post(CHAT, chat("hello"))[0] == 200, 30, "it serves")
    assert pooled.router().pid == router.pid, "it has registered again"
    pooled.stop()
