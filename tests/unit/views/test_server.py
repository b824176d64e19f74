"""The view of a deployment of fake processes, over HTTP: what browsers get, and what reaches the processes."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from baton.views.server import ViewServer
from tests.view.fake_deployment import TOKEN, FakeDeployment, disaggregated

Json = dict[str, Any]


class Browser:
    """Reads the events of a view as a browser does."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session
        self.processes: dict[str, Json] = {}
        self.requests: dict[str, Json] = {}
        self.flows: list[list[Any]] = []
        self._changed = asyncio.Event()

    async def watch(self) -> None:
        async with self.session.get(f"{self.url}api/events") as reply:
            async for line in reply.content:
                if line.startswith(b"data: "):
                    self._take(json.loads(line.removeprefix(b"data: ")))

    def _take(self, data: Json) -> None:
        self.processes |= {each["name"]: each for each in data["processes"]}
        self.requests |= {each["id"]: each for each in data["requests"]}
        self.flows += data.get("flows", [])
        self._changed.set()

    async def until(self, seen: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not seen():
                self._changed.clear()
                await self._changed.wait()

    async def get(self, path: str) -> Json:
        async with self.session.get(f"{self.url}{path}") as reply:
            return json.loads(await reply.text())  # type: ignore[no-any-return]


@asynccontextmanager
async def watched(fake: FakeDeployment) -> AsyncIterator[Browser]:
    await fake.start()
    view = ViewServer(fake)
    await view.start()
    try:
        async with aiohttp.ClientSession(read_bufsize=1 << 24) as session:
            browser = Browser(view.url, session)
            watching = asyncio.create_task(browser.watch())
            try:
                yield browser
            finally:
                watching.cancel()
    finally:
        await view.aclose()
        await fake.stop()


def run(test: Callable[[FakeDeployment, Browser], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        fake = disaggregated(1, 2, **options)
        async with watched(fake) as browser:
            await browser.until(lambda: len(browser.processes) == len(fake.processes))
            await test(fake, browser)

    asyncio.run(main())


def test_a_request_is_one_timeline_across_its_processes() -> None:
    async def test(fake: FakeDeployment, browser: Browser) -> None:
        before_us = time.time_ns() // 1000 - 30_000_000
        trace_id = fake.begin(before_us, "chat")
        await browser.until(
            lambda: browser.requests.get(trace_id, {}).get("processes", [""])[-1].startswith("8000/dec")
        )
        trace = await browser.get(f"api/requests/{trace_id}")
        assert [hop["role"] for hop in trace["hops"]] == ["frontend", "prefill", "decode"]
        assert {"kv_moved", "first_token", "finished"} <= {event[1] for event in trace["hops"][-1]["events"]}
        assert browser.requests[trace_id]["kv_bytes"] > 0
        series = await browser.get("api/series")
        assert {group["role"] for group in series["groups"]} == {"frontend", "prefill", "decode"}

    run(test)


def test_hand_offs_flow_while_they_happen() -> None:
    async def test(fake: FakeDeployment, browser: Browser) -> None:
        fake.begin(time.time_ns() // 1000, "chat")
        await browser.until(lambda: any(flow[2] in ("shm", "tcp") for flow in browser.flows))
        assert any(flow[:3] == ["8000/frontend", "8000/prefill-0", "request"] for flow in browser.flows)
        [moved] = [flow for flow in browser.flows if flow[2] in ("shm", "tcp")]
        assert moved[0] == "8000/prefill-0"
        assert moved[4] > 0

    run(test)


def test_a_command_reaches_the_process_with_its_token_and_the_page_never_has_it() -> None:
    async def test(fake: FakeDeployment, browser: Browser) -> None:
        url = f"{browser.url}api/processes/8000/decode-0/commands/pause"
        origin = {"Origin": browser.url.rstrip("/")}
        async with browser.session.post(url, json={"mode": "drain"}, headers=origin) as reply:
            assert reply.status == 200
            assert (await reply.json())["paused"] is True
        assert fake.of("decode")[0].commands == [("pause", {"mode": "drain"})]
        await browser.until(lambda: browser.processes["8000/decode-0"]["health"] == "paused")
        shown = json.dumps([await browser.get("api/processes/8000/decode-0/about"), browser.processes])
        assert TOKEN not in shown

    run(test)


def test_a_command_that_arrives_in_parts_is_passed_on_whole_and_one_that_is_too_large_is_refused() -> None:
    async def in_parts() -> AsyncIterator[bytes]:
        yield b'{"mode": '
        await asyncio.sleep(0.1)
        yield b'"drain"}'

    async def test(fake: FakeDeployment, browser: Browser) -> None:
        url = f"{browser.url}api/processes/8000/decode-0/commands/pause"
        headers = {"Content-Type": "application/json"}
        async with browser.session.post(url, data=in_parts(), headers=headers) as reply:
            assert reply.status == 200
        assert fake.of("decode")[0].commands == [("pause", {"mode": "drain"})]
        async with browser.session.post(url, json={"mode": "x" * (64 << 10)}) as reply:
            assert (reply.status, "64 KiB" in await reply.text()) == (400, True)

    run(test)


def test_commands_that_replace_weights_are_left_to_baton_ctl() -> None:
    async def test(fake: FakeDeployment, browser: Browser) -> None:
        for path, status in (("weights/update", 400), ("pause", 404)):
            name = "8000/decode-0" if status == 400 else "8000/unknown"
            url = f"{browser.url}api/processes/{name}/commands/{path}"
            async with browser.session.post(url, json={}) as reply:
                assert reply.status == status
                assert "baton ctl" in (await reply.json())["error"]["message"] or status == 404
        async with browser.session.post(f"{browser.url}api/processes/8000/decode-0/commands/pause", data="{}") as reply:
            assert reply.status == 400, "a form of another page cannot send JSON"
        assert not any(process.commands for process in fake.processes)

    run(test)


def test_a_process_that_ends_is_shown_as_gone_and_its_requests_as_lost() -> None:
    async def test(fake: FakeDeployment, browser: Browser) -> None:
        trace_id = fake.begin(time.time_ns() // 1000, "long")
        decode = next(process for process in fake.of("decode") if process.hops)
        await browser.until(lambda: decode.name in browser.requests.get(trace_id, {}).get("processes", []))
        fake.processes.remove(decode)
        await decode.stop()
        await browser.until(lambda: browser.processes[decode.name]["health"] == "gone")
        trace = await browser.get(f"api/requests/{trace_id}")
        assert [hop["state"] for hop in trace["hops"] if hop["process"] == decode.name] == ["lost"]

    run(test)


def test_a_process_that_does_not_reply_delays_no_other() -> None:
    async def test(fake: FakeDeployment, browser: Browser) -> None:
        silent, other = fake.of("decode")
        await silent.stop()
        await browser.until(lambda: browser.processes[silent.name]["health"] == "unreachable")
        trace_id = fake.begin(time.time_ns() // 1000 - 30_000_000, "failed")
        await browser.until(lambda: browser.requests.get(trace_id, {}).get("error_code") == "engine_failed")
        assert browser.processes[other.name]["health"] == "serving"

    run(test)


def test_processes_are_asked_only_while_somebody_watches() -> None:
    async def main() -> None:
        fake = disaggregated(1, 1)
        await fake.start()
        view = ViewServer(fake)
        await view.start()
        async with aiohttp.ClientSession() as session, session.get(view.url) as reply:
            assert reply.status == 200
        assert sum(process.asked for process in fake.processes) == 0
        await view.aclose()
        await fake.stop()

    asyncio.run(main())
