"""A worker in one process with its system server, and an HTTP client that sends it commands."""

import asyncio
import io
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import msgspec

from baton.config.load import control_token
from baton.config.settings import Settings
from baton.control.http.connections import DEFAULT_LIMITS, ConnectionLimits
from baton.control.http.server import SystemServer
from baton.ports.engine import Capabilities, EngineInfo
from baton.process.worker import Worker
from baton.protocol.commands import Outcome
from baton.protocol.outputs import Finished, FinishReason, TokenDelta
from baton.testing import ScriptedEngine
from baton.testing.fakes import SCRIPTED_INFO, ControlStep, Script
from baton.testing.memory_runtime import MemoryEndpoint, MemoryRuntime

PATH = "baton.worker.generate"
TOKEN = "the token of a worker that was given none"
ONE_TOKEN: Script = [TokenDelta([1]), Finished(FinishReason.LENGTH)]
DONE = Outcome(message="done")
EVERYTHING = Capabilities(
    memory_tags=frozenset({"kv_cache", "weights"}),
    weight_sources=frozenset({"disk", "tensors", "shared_memory", "group", "ipc"}),
    pause_modes=frozenset({"abort", "retract", "keep"}),
    clear_cache=True,
    profile=True,
    expert_records=True,
    lora=True,
)


class Reply(NamedTuple):
    """An HTTP response."""

    status: int
    body: Any
    headers: Mapping[str, str]


class WorkerHarness:
    """A running worker and its system server."""

    def __init__(self, engine: ScriptedEngine, limits: ConnectionLimits = DEFAULT_LIMITS, **settings: Any) -> None:
        self.engine = engine
        self.runtime = MemoryRuntime()
        self.stop = asyncio.Event()
        self.ready = asyncio.Event()
        chosen = msgspec.structs.replace(Settings(engine="echo"), **settings)
        self.server = SystemServer(
            "127.0.0.1",
            chosen.system_port,
            token=(control_token(chosen) or TOKEN) if chosen.accepts_commands else None,
            limits=limits,
        )
        self.server.subject = self.worker = Worker(chosen, engine, self.runtime)
        self.running: asyncio.Task[None] = asyncio.create_task(self.worker.run(self.stop, self.ready.set))

    @property
    def endpoint(self) -> MemoryEndpoint:
        [endpoint] = self.runtime.endpoints[PATH]
        return endpoint

    async def http(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Call the system server, with `TOKEN` for commands; return the body decoded if it is JSON."""
        if path.startswith("/control/") and not (headers or {}).get("Authorization"):
            headers = {**(headers or {}), "Authorization": f"Bearer {TOKEN}"}
        data = io.BytesIO(body) if isinstance(body, bytes) else body
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"{self.server.url}{path}", data=data, headers=headers) as answer,
        ):
            is_json = answer.content_type == "application/json"
            return Reply(answer.status, await (answer.json() if is_json else answer.text()), answer.headers)

    async def send(self, path: str, body: Any = None, method: str = "POST", **headers: str) -> Reply:
        """Send a command."""
        data = msgspec.json.encode(body) if body is not None else None
        return await self.http(method, f"/control/{path}", data, headers)

    async def ok(self, path: str, body: Any = None) -> dict[str, Any]:
        """Send a command that succeeds; return its outcome."""
        reply = await self.send(path, body)
        assert reply.status == 200, reply
        return dict(reply.body)

    async def refused(self, path: str, body: Any = None, status: int = 400, code: str = "invalid_request") -> str:
        """Send a command that is refused; return the message."""
        reply = await self.send(path, body)
        assert (reply.status, reply.body["error"]["code"]) == (status, code), reply
        return str(reply.body["error"]["message"])

    async def status(self) -> dict[str, Any]:
        """Return the state of the worker."""
        reply = await self.send("status", method="GET")
        assert reply.status == 200, reply
        return dict(reply.body)

    async def call(self) -> list[Any]:
        """Send a request, as a frontend does."""
        client = await self.runtime.client(PATH)
        return [reply async for reply in client.call({"token_ids": [1]})]

    def serves(self) -> bool:
        """Whether frontends send requests here."""
        return self.endpoint.registered and self.worker.health().ready


@asynccontextmanager
async def running_worker(
    *control: ControlStep,
    can: Capabilities = EVERYTHING,
    scripts: Sequence[Script] = (ONE_TOKEN,),
    info: EngineInfo = SCRIPTED_INFO,
    **settings: Any,
) -> AsyncIterator[WorkerHarness]:
    """Run a worker until the end of the block; it must end without an error."""
    harness = WorkerHarness(ScriptedEngine(*scripts, capabilities=can, info=info, control=control), **settings)
    await harness.server.start()
    ready = asyncio.create_task(harness.ready.wait())
    await asyncio.wait([harness.running, ready], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield harness
    finally:
        ready.cancel()
        harness.stop.set()
        try:
            await harness.running
        finally:
            await harness.server.aclose()
