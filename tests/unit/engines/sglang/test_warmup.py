"""The warm-up of a prefill engine: part of its start, which ends with it."""

import asyncio

import pytest

from baton.engines.sglang.warmup import warm_up
from baton.errors import EngineDead
from baton.testing.bounded import run_bounded
from tests.unit.engines.sglang.test_requests import inside, make

LENGTH = {"type": "length", "length": 1}


def test_every_rank_computes_a_prompt_before_the_start_is_done() -> None:
    async def body() -> None:
        front, requests = make()
        warming = asyncio.create_task(warm_up(requests, ranks=2, vocab_size=12))
        await inside(front, 2)
        first, second = front.chunks
        front.put(first, {"output_ids": [1], "meta_info": {"finish_reason": LENGTH}})
        await asyncio.sleep(0)
        assert not warming.done()
        front.put(second, {"output_ids": [1], "meta_info": {"finish_reason": LENGTH}})
        await warming

    run_bounded(body())


def test_a_warm_up_that_fails_ends_the_start_and_leaves_nothing_running() -> None:
    async def body() -> None:
        front, requests = make()
        warming = asyncio.create_task(warm_up(requests, ranks=2, vocab_size=12))
        await inside(front, 2)
        front.put(next(iter(front.chunks)), RuntimeError("no kernel image"))
        with pytest.raises(EngineDead, match=r"the first request failed.*no kernel image"):
            await warming
        assert (requests.waiting, requests.running) == (0, 0)

    run_bounded(body())
