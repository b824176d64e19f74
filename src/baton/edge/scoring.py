"""Answers requests that ask for their own prompt, with one request to the frontend for each prompt."""

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec

from baton.edge.messages import Answer
from baton.edge.prompt_answers import events, joined_answer, token_ids_of
from baton.edge.prompt_requests import (
    COMPLETIONS,
    Prompt,
    PromptQuery,
    frontend_body,
    prompt_query,
    prompts_of,
    tokenizing_body,
)
from baton.edge.routes import Composed, Json, Send

AT_ONCE = 16
"""How many prompts of one request are sent at the same time."""


def compose(path: str, body: Json) -> Composed | None:
    """See `Compose`."""
    query = prompt_query(path, body)
    return None if query is None else partial(answer_query, query, body)


async def answer_query(query: PromptQuery, body: Json, send: Send) -> Answer:
    """Answer a request that asks for its prompts. Cancelling the call cancels what has been sent."""
    prompts: list[Prompt | None] = list(prompts_of(body)) if query.path == COMPLETIONS else [None]
    if query.truncate is not None:
        keep = query.truncate
        tokenized = await _send_all([tokenizing_body(body, prompt) for prompt in prompts if prompt is not None], send)
        prompts = [token_ids_of(answer)[-keep:] for answer in tokenized]
    answers = await _send_all([frontend_body(query, body, prompt) for prompt in prompts], send)
    joined = joined_answer(query, ["" if prompt is None else prompt for prompt in prompts], answers, _requested(body))
    if query.stream:
        return Answer(body=events(query, joined), content_type=b"text/event-stream")
    return Answer(body=msgspec.json.encode(joined))


async def _send_all(bodies: Sequence[Json], send: Send) -> list[Json]:
    """Send every body; return the answers in their order. The first error cancels the others."""
    places = asyncio.Semaphore(AT_ONCE)

    async def send_one(body: Json) -> Json:
        async with places:
            return await send(body)

    try:
        async with asyncio.TaskGroup() as group:
            sent = [group.create_task(send_one(body)) for body in bodies]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in sent]


def _requested(body: Json) -> list[str]:
    extensions = body.get("nvext")
    fields = extensions.get("extra_fields") if isinstance(extensions, dict) else None
    return [str(field) for field in fields] if isinstance(fields, list) else []
