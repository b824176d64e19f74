"""A worker in one process with its system server, and an operator who talks HTTP to it."""

import asyncio
import io
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import msgspec

from baton.config.load import control_token
from baton.config.settings import Settings
from baton.control.http.server import SystemServer
from baton.ports.engine import Capabilities
from baton.process.worker import Worker
from baton.protocol.commands import Outcome
from baton.protocol.outputs import Finished, FinishReason, TokenDelta
from baton.testing import ScriptedEngine
from baton.testing.fakes import ControlStep, Script
from baton.testing.memory_runtime import MemoryEndpoint, MemoryRuntime

PATH = "baton.worker.generate"
WELL: Script = [TokenDelta([1]), Finished(FinishReason.LENGTH)]
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
    """What came back."""

    status: int
    body: Any
    headers: Mapping[str, str]


class House:
    """A worker that runs, its system server, and its operator."""

    def __init__(self, engine: ScriptedEngine, **settings: Any) -> None:
        self.engine = engine
        self.runtime = MemoryRuntime()
        self.stop = asyncio.Event()
        self.ready = asyncio.Event()
        given = msgspec.structs.replace(Settings(engine="echo"), **settings)
        self.server = SystemServer(
            "127.0.0.1", given.system_port, accepts_commands=given.accepts_commands, token=control_token(given)
        )
        self.server.subject = self.worker = Worker(given, engine, self.runtime)
        self.running: asyncio.Task[None] = asyncio.create_task(self.worker.run(self.stop, self.ready.set))

    @property
    def endpoint(self) -> MemoryEndpoint:
        [endpoint] = self.runtime.endpoints[PATH]
        return endpoint

    async def http(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Call the system server; return the body decoded if it is JSON."""
        data = io.BytesIO(body) if isinstance(body, bytes) else body
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"{self.server.url}{path}", data=data, headers=headers) as answer,
        ):
            is_json = answer.content_type == "application/json"
            return Reply(answer.status, await (answer.json() if is_json else answer.text()), answer.headers)

    async def order(self, path: str, body: Any = None, method: str = "POST", **headers: str) -> Reply:
        """Call a control route."""
        data = msgspec.json.encode(body) if body is not None else None
        return await self.http(method, f"/control/{path}", data, headers)

    async def ok(self, path: str, body: Any = None) -> dict[str, Any]:
        """Give an order that is carried out; return its outcome."""
        reply = await self.order(path, body)
        assert reply.status == 200, reply
        return dict(reply.body)

    async def refused(self, path: str, body: Any = None, status: int = 400, code: str = "invalid_request") -> str:
        """Give an order that is refused; return the message."""
        reply = await self.order(path, body)
        assert (reply.status, reply.body["error"]["code"]) == (status, code), reply
        return str(reply.body["error"]["message"])

    async def status(self) -> dict[str, Any]:
        """Return where the worker stands."""
        reply = await self.order("status", method="GET")
        assert reply.status == 200, reply
        return dict(reply.body)

    async def call(self) -> list[Any]:
        """Ask for an answer, as a client."""
        client = await self.runtime.client(PATH)
        return [reply async for reply in client.call({"token_ids": [1]})]

    def serves(self) -> bool:
        """Whether requests come here."""
        return self.endpoint.registered and self.worker.health().ready


@asynccontextmanager
async def living(
    *control: ControlStep, can: Capabilities = EVERYTHING, scripts: Sequence[Script] = (WELL,), **settings: Any
) -> AsyncIterator[House]:
    """Run a worker until the end of the block, and see that it ends well."""
    house = House(ScriptedEngine(*scripts, capabilities=can, control=control), **settings)
    await house.server.start()
    ready = asyncio.create_task(house.ready.wait())
    await asyncio.wait([house.running, ready], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield house
    finally:
        ready.cancel()
        house.stop.set()
        try:
            await house.running
        finally:
            await house.server.aclose()
