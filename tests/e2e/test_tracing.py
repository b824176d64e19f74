"""Where a request can be followed: its trace id and its own id, from the client to the worker's log."""

import asyncio
import re

import pytest

from tests.e2e.harness import Serve, echoed, eventually

pytestmark = pytest.mark.e2e

SERVE = ("--echo-pace-ms", "5")
CHAT = "/v1/chat/completions"
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) [\w.:]+ \S")


def traceparent(trace_id: str, span_id: str = "b7ad6b7169203331") -> str:
    return f"00-{trace_id}-{span_id}-01"


def request_lines(serve: Serve, trace_id: str) -> list[str]:
    """Return the worker's lines for the requests of a trace."""
    return [line for line in serve.log_of("worker-0").splitlines() if f"trace={trace_id}" in line]


def test_the_trace_id_of_the_client_is_in_the_workers_log(serve: Serve) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    serve.client().chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": "Hello"}],
        extra_headers={"traceparent": traceparent(trace_id)},
    )
    (line,) = eventually(lambda: request_lines(serve, trace_id), what="the line of the request")
    assert " completed " in line
    assert "prompt=5 cached=0 completion=5" in line


def test_two_requests_of_one_trace_run_side_by_side(serve: Serve) -> None:
    trace_id = "1af7651916cd43dd8448eb211c80319c"
    prompts = ["the first of two", "the second of two"]

    async def run() -> list[str]:
        async with serve.async_client() as client:
            both_run = asyncio.Barrier(2)

            async def one(prompt: str) -> str:
                stream = await client.chat.completions.create(
                    model="echo",
                    messages=[{"role": "user", "content": prompt}],
                    max_tokens=100,
                    stream=True,
                    extra_headers={"traceparent": traceparent(trace_id)},
                )
                text = (await anext(stream)).choices[0].delta.content or ""
                # Neither goes on before the other has begun.
                await asyncio.wait_for(both_run.wait(), 30)
                return text + "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(one, prompts))

    assert asyncio.run(run()) == [echoed(prompt, 100) for prompt in prompts]
    lines = eventually(lambda: len(found := request_lines(serve, trace_id)) == 2 and found, what="both lines")
    # The first word after the logger is the request's own id.
    assert len({re.search(r"baton\.request (\S+)", line)[1] for line in lines}) == 2


def test_a_request_without_a_trace_and_an_id_gets_both(serve: Serve) -> None:
    serve.client().chat.completions.create(model="echo", messages=[{"role": "user", "content": "no trace of me"}])
    eventually(
        lambda: re.search(
            r"prompt=14 .* trace=[0-9a-f]{32} client=[0-9a-f-]{36}$", serve.log_of("worker-0"), re.MULTILINE
        ),
        what="a trace id and a request id of its own",
    )


def test_a_malformed_traceparent_harms_nobody(serve: Serve) -> None:
    for value in ("", "garbage", "00-xyz-1-01", "ff-" + "0" * 32 + "-" + "0" * 16 + "-00", "-" * 5000):
        status, _ = serve.post(
            CHAT,
            {"model": "echo", "messages": [{"role": "user", "content": "Hello"}]},
            {"traceparent": value},
        )
        assert status == 200


def test_the_request_id_of_the_client_is_kept(serve: Serve) -> None:
    # A refused request: the frontend logs those, and what it knows of them.
    serve.post(
        CHAT,
        {"model": "echo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2_000_000},
        {"x-request-id": "my-own-id-7"},
    )
    eventually(lambda: "my-own-id-7" in serve.log_of("frontend"), what="the id in the frontend's log")
    lines = [line for line in serve.log_of("frontend").splitlines() if "my-own-id-7" in line]
    assert all("x_request_id=my-own-id-7" in line for line in lines)


def test_every_line_of_every_log_has_the_same_format(serve: Serve) -> None:
    chat = {"model": "echo", "messages": [{"role": "user", "content": "Hello"}]}
    for body in ({"max_tokens": 2_000_000}, {"allowed_token_ids": [1]}, {"stream": 1}, {"max_tokens": 2}):
        serve.post(CHAT, {**chat, **body}, {"x-request-id": "last-of-these"})
    for name in ("worker-0", "frontend"):
        log = eventually(lambda n=name: "last-of-these" in (text := serve.log_of(n)) and text, what=f"a line of {name}")
        assert [line for line in log.splitlines() if not LINE.match(line)] == []


def test_the_clients_own_request_id_reaches_the_worker(serve: Serve) -> None:
    serve.client().chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": "it is me"}],
        extra_headers={"x-request-id": "my-own-id-8"},
    )
    eventually(lambda: "client=my-own-id-8" in serve.log_of("worker-0"), what="the client's id in the worker's log")
