"""A deployment of any size in one process: system servers with the reports of processes, and simulated requests."""

import asyncio
import random
import time
from collections import deque
from collections.abc import Sequence

import msgspec
from aiohttp import web

from baton.views.deployment import ProcessAddress
from tests.view.fake_requests import BLOCK, MODEL, FakeHop, RequestPlan

TOKEN = "the control token of all fake processes"
TOTAL_BLOCKS = 4096
KEPT = 1000
COMMANDS = (
    "pause",
    "continue",
    "memory/release",
    "memory/resume",
    "cache/clear",
    "profile/start",
    "profile/stop",
)

Json = dict[str, object]


class FakeProcess:
    """A process with its system server."""

    def __init__(self, name: str, role: str, pool: str = "") -> None:
        self.name, self.role, self.pool = name, role, pool
        self.url = ""
        self.health = "serving"
        self.hops: list[FakeHop] = []
        self.finished: deque[FakeHop] = deque(maxlen=KEPT)
        self.sequence = 0
        self.transfers: dict[str, int] = {}
        self.errors: list[Json] = []
        self.commands: list[tuple[str, Json]] = []
        self.paused = False
        self.asked = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/control/about", self._about)
        app.router.add_get("/control/timelines", self._timelines)
        app.router.add_post("/control/{command:.+}", self._command)
        if self.role == "frontend":
            app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def process(self) -> Json:
        return {
            "name": self.name,
            "role": self.role,
            "model": None if self.role == "frontend" else MODEL,
            "engine": None if self.role in ("frontend", "router") else "torch",
            "pid": 4000 + abs(hash(self.name)) % 9000,
            "host": "gpu-node-1",
            "started_unix_s": time.time() - 4000,
        }

    def settle(self, now_us: int) -> None:
        """Let requests end whose time has come."""
        ended = [hop for hop in self.hops if hop.begin_us + hop.duration_us <= now_us]
        self.hops = [hop for hop in self.hops if hop.begin_us + hop.duration_us > now_us]
        for hop in sorted(ended, key=lambda each: each.begin_us + each.duration_us):
            self.sequence += 1
            hop.sequence = self.sequence
            self.finished.append(hop)
            for _, phase, detail in hop.events:
                if phase == "kv_moved":
                    transport = str(detail["transport"])
                    self.transfers[transport] = self.transfers.get(transport, 0) + int(str(detail["bytes"]))
            if hop.error is not None:
                self.errors = [*self.errors, {"unix_us": now_us, "request_id": hop.id, **hop.error}][-20:]

    def _refused(self, request: web.Request) -> bool:
        self.asked += 1
        return request.headers.get("Authorization") != f"Bearer {TOKEN}"

    async def _about(self, request: web.Request) -> web.Response:
        if self._refused(request):
            return web.Response(status=401)
        now_us = time.time_ns() // 1000
        self.settle(now_us)
        running = [hop for hop in self.hops if hop.begin_us <= now_us]
        blocks = sum((hop.prompt + hop.completion) // BLOCK + 1 for hop in running)
        engine = self.role not in ("frontend", "router", "process")
        settings: Json = {"role": self.role, "model": MODEL, "kv.transports": "shm,tcp"}
        if self.pool:
            settings["namespace"] = f"baton-{self.role}-{self.pool}"
        if self.role == "frontend":
            settings = {"host": "127.0.0.1", "port": 8000, "router": "kv"}
        load = {
            "rank": 0,
            "running": len(running),
            "waiting": 0,
            "used_blocks": min(blocks, TOTAL_BLOCKS),
            "total_blocks": TOTAL_BLOCKS,
        }
        return _json(
            {
                "process": self.process,
                "settings": settings,
                "capabilities": {"abort_by_id": True, "modalities": ["image"], "loras": False} if engine else {},
                "load": [load] if engine and self.role != "encode" else [],
                "health": "paused" if self.paused else self.health,
                "in_flight": len(running),
                "rooms": {"offered": sum(1 for hop in running if self.role == "prefill")} if engine else {},
                "transfers": self.transfers,
                "last_errors": self.errors,
                "commands": COMMANDS if engine else [],
            }
        )

    async def _timelines(self, request: web.Request) -> web.Response:
        if self._refused(request):
            return web.Response(status=401)
        now_us = time.time_ns() // 1000
        self.settle(now_us)
        after, limit = int(request.query["after"]), int(request.query["limit"])
        finished = [hop for hop in self.finished if hop.sequence > after][:limit]
        running = [hop for hop in self.hops if hop.begin_us <= now_us][:limit]
        return _json(
            {
                "process": self.process,
                "now_unix_us": now_us,
                "next": finished[-1].sequence if finished else max(after, self.sequence),
                "dropped": 0,
                "timelines": [hop.report(now_us) for hop in (*finished, *running)],
            }
        )

    async def _command(self, request: web.Request) -> web.Response:
        if self._refused(request) or "Origin" in request.headers:
            return web.Response(status=401)
        command, body = request.match_info["command"], await request.json()
        self.commands.append((command, body))
        self.paused = {"pause": True, "continue": False}.get(command, self.paused)
        return _json({"message": f"{command} is done", "paused": self.paused})

    async def _models(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


class FakeDeployment:
    """A `ProcessFinder` with the processes that it has started."""

    def __init__(self, processes: Sequence[FakeProcess], seed: int = 7) -> None:
        self.processes = list(processes)
        self.random = random.Random(seed)

    async def start(self) -> None:
        for process in self.processes:
            await process.start()

    async def stop(self) -> None:
        await asyncio.gather(*(process.stop() for process in self.processes))

    async def find(self) -> Sequence[ProcessAddress]:
        return [ProcessAddress(name=each.name, url=each.url, token=TOKEN) for each in self.processes]

    def of(self, role: str) -> list[FakeProcess]:
        return [each for each in self.processes if each.role == role]

    async def traffic(self, per_second: float) -> None:
        """Begin requests at random times, until cancelled."""
        while True:
            self.begin(time.time_ns() // 1000)
            await asyncio.sleep(self.random.expovariate(per_second))

    def history(self, seconds: float, per_second: float) -> None:
        """Add requests that have been before."""
        now_us = time.time_ns() // 1000
        for _ in range(int(seconds * per_second)):
            self.begin(now_us - int(self.random.random() * seconds * 1e6))

    def begin(self, now_us: int, kind: str = "") -> str:
        """Begin a request and return its trace id."""
        kind = kind or self.random.choices(["chat", "image", "failed", "slow", "retried"], [80, 8, 3, 6, 3])[0]
        return RequestPlan(self, now_us, kind).plan()


def disaggregated(prefill: int, decode: int, encode: int = 1, pools: Sequence[str] = ()) -> FakeDeployment:
    """Return a deployment with these workers; with pools, each has that many behind a router."""
    processes = [FakeProcess("8000/frontend", "frontend")]
    processes += [FakeProcess("8000/router", "router")] if pools else []
    processes += [FakeProcess(f"8000/encode-{number}", "encode") for number in range(encode)]
    for pool in pools or ("",):
        for role, count in (("prefill", prefill), ("decode", decode)):
            name = f"{role}-{pool}" if pool else role
            processes += [FakeProcess(f"8000/{name}-{number}", role, pool) for number in range(count)]
    return FakeDeployment(processes)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
