"""The chat of a browser goes to the endpoint of the deployment, and ends with the browser."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from baton.views.deployment import ProcessAddress
from baton.views.server import ViewServer


class Nothing:
    async def find(self) -> Sequence[ProcessAddress]:
        return []


class Endpoint:
    """An OpenAI endpoint that sends one chunk and then waits for the client to leave."""

    def __init__(self, breaks_off: bool = False) -> None:
        self.breaks_off = breaks_off
        self.headers: Mapping[str, str] = {}
        self.left = asyncio.Event()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.headers = request.headers.copy()
        if (await request.json()).get("model") == "unknown":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        if self.breaks_off:
            assert request.transport is not None
            request.transport.abort()
            return response
        try:
            await asyncio.sleep(60)
        finally:
            self.left.set()
        return response


@asynccontextmanager
async def serving(endpoint: Endpoint) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.chat)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    view = ViewServer(Nothing(), endpoint=f"http://127.0.0.1:{runner.addresses[0][1]}", api_key="a key")
    await view.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield f"{view.url}api/chat", session
    finally:
        await view.aclose()
        await runner.cleanup()


def test_a_browser_that_stops_reading_cancels_the_request() -> None:
    async def run() -> None:
        endpoint = Endpoint()
        async with asyncio.timeout(20), serving(endpoint) as (url, session):
            async with session.post(url, json={"model": "m"}) as reply:
                assert reply.headers["Content-Type"] == "text/event-stream"
                assert await reply.content.readany() == b"data: {}\n\n"
                reply.close()
            await endpoint.left.wait()
            assert endpoint.headers["Authorization"] == "Bearer a key"
            assert "traceparent" not in endpoint.headers, "a parent that nothing exports"

    asyncio.run(run())


def test_a_browser_can_name_its_request_before_the_answer_begins() -> None:
    async def run() -> None:
        endpoint = Endpoint(breaks_off=True)
        async with (
            asyncio.timeout(20),
            serving(endpoint) as (url, session),
            session.post(url, json={"model": "m"}, headers={"X-Request-Id": "view-1"}) as reply,
        ):
            await reply.read()
        assert endpoint.headers["x-request-id"] == "view-1"

    asyncio.run(run())


def test_an_answer_that_the_endpoint_breaks_off_ends_with_an_error() -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(20),
            serving(Endpoint(breaks_off=True)) as (url, session),
            session.post(url, json={"model": "m"}) as reply,
        ):
            body = (await reply.read()).decode()
        *_, last = [line for line in body.splitlines() if line.startswith("data: ")]
        assert "broke the answer off" in json.loads(last.removeprefix("data: "))["error"]["message"]

    asyncio.run(run())


def test_an_error_of_the_endpoint_is_passed_on() -> None:
    async def run() -> None:
        async with serving(Endpoint()) as (url, session), session.post(url, json={"model": "unknown"}) as reply:
            assert reply.status == 404
            assert (await reply.json())["error"]["message"] == "no such model"

    asyncio.run(run())


def test_a_deployment_without_a_frontend_says_what_to_give() -> None:
    async def run() -> None:
        view = ViewServer(Nothing())
        await view.start()
        async with aiohttp.ClientSession() as session, session.get(f"{view.url}api/models") as reply:
            assert reply.status == 404
            assert "--endpoint" in (await reply.json())["error"]["message"]
        await view.aclose()

    asyncio.run(run())
