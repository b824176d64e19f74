"""The first request of a prefill engine, before it serves: it compiles and allocates."""

import asyncio

from baton.engines.sglang.requests import Requests
from baton.errors import BatonError, EngineDead
from baton.ports.engine import Work
from baton.protocol.handoff import LocalProbe
from baton.protocol.ids import new_request_id
from baton.protocol.requests import Sampling, StopConditions

PROMPT = (10, 11, 12, 13)


async def warm_up(requests: Requests, ranks: int, vocab_size: int) -> None:
    """Compute a short prompt on every rank. Raises EngineDead if that fails."""
    prompt = tuple(token % vocab_size for token in PROMPT)
    try:
        async with asyncio.TaskGroup() as group:
            for rank in range(ranks):
                group.create_task(_run_prompt(requests, prompt, rank if ranks > 1 else None))
    except ExceptionGroup as errors:
        raise EngineDead(f"the first request failed: {errors.exceptions[0]}") from errors


async def _run_prompt(requests: Requests, prompt: tuple[int, ...], rank: int | None) -> None:
    work = Work(
        request_id=new_request_id("warm-up"),
        token_ids=prompt,
        max_tokens=1,
        stop=StopConditions(ignore_eos=True),
        sampling=Sampling(temperature=0.0),
        handoff=LocalProbe(),
        dp_rank=rank,
    )
    stream = requests.submit(work)
    try:
        while await stream.read():
            pass
    except (BatonError, asyncio.CancelledError):
        await requests.abort(work.request_id)
        raise
