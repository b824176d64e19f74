"""The load generator: N keep-alive connections, each sending streamed chat requests back to back.

It runs in its own process (`python -m bench.load '<LoadSpec as JSON>'`), prints the line `open`
when every stream has received its first event, and ends with one line that is a LoadResult.
"""

import asyncio
import math
import resource
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter, process_time
from typing import cast

import msgspec
import uvloop

from bench.chat import HOST, chat_request
from bench.sse import END_OF_BODY, ResponseScanner
from bench.stalled import CONNECT_TIMEOUT_S, StalledClient

OPEN_LINE = "open"
# Connecting in batches stays below the listen backlog of every system under test.
CONNECT_BATCH = 64
# Some servers accept one connection per event loop iteration; under load the last ones would wait for seconds.
# Streams are measured, not connecting.
ACCEPT_S = 0.3


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True):
    port: int
    streams: int
    tokens: int
    requests: int
    """Maximum number of requests per connection."""
    start_limit_s: float
    """No request starts after this many seconds."""
    request_timeout_s: float
    """A request that is unfinished after this many seconds is disconnected and counted as a timeout."""
    hold_s: float = 0.0
    """When set, disconnect this many seconds after every stream is open instead of reading to the end."""
    stalled_tokens: int = 0
    """When set, one more client requests this many tokens and never reads them."""
    stall_lead_s: float = 0.0
    """Maximum wait before the load until all buffers between that client and the engine are full."""
    server_pids: tuple[int, ...] = ()
    """The processes that compute and carry that client's stream."""


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    tokens: int
    events: int
    duration_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    gap_ms_p99: float
    request_ms_p50: float
    request_ms_p99: float
    cpu_s: float
    errors: dict[str, int]
    stalled_full: bool = False
    """Whether the stalled client's buffers were full before the load began."""
    stalled_unread_bytes: int = 0


def percentile(ordered: Sequence[float], fraction: float, leading_zeros: int = 0) -> float:
    """Nearest-rank percentile of sorted values preceded by that many zeros; NaN-free, 0 when empty."""
    rank = math.ceil(fraction * (leading_zeros + len(ordered))) - 1 - leading_zeros
    return ordered[rank] if ordered and rank >= 0 else 0.0


class Load:
    """State shared by all connections of one run: the request, the limits and the counters."""

    def __init__(self, spec: LoadSpec) -> None:
        self.spec = spec
        self.request = chat_request(spec.tokens)
        self.started = 0.0
        self.finished = 0.0
        self.requests = self.tokens = self.events = 0
        self.ttfts = array("d")
        self.gaps = array("d")
        # Events in the same read as the previous one: gaps of zero, counted and not stored.
        self.merged = 0
        self.durations = array("d")
        self.errors: Counter[str] = Counter()
        self._unopened = self._running = spec.streams
        self.all_open = asyncio.Event()
        self.all_done = asyncio.Event()

    def may_start(self, sent: int) -> bool:
        return sent < self.spec.requests and perf_counter() - self.started < self.spec.start_limit_s

    def note_open(self) -> None:
        self._unopened -= 1
        if not self._unopened:
            print(OPEN_LINE, flush=True)
            self.all_open.set()

    def note_done(self) -> None:
        self._running -= 1
        if not self._running:
            self.all_done.set()

    def unfinished(self) -> int:
        return self._running

    def result(self, cpu_s: float) -> LoadResult:
        ttfts, gaps, durations = sorted(self.ttfts), sorted(self.gaps), sorted(self.durations)
        return LoadResult(
            requests=self.requests,
            tokens=self.tokens,
            events=self.events,
            duration_s=self.finished - self.started,
            ttft_ms_p50=1000 * percentile(ttfts, 0.5),
            ttft_ms_p99=1000 * percentile(ttfts, 0.99),
            gap_ms_p99=1000 * percentile(gaps, 0.99, self.merged),
            request_ms_p50=1000 * percentile(durations, 0.5),
            request_ms_p99=1000 * percentile(durations, 0.99),
            cpu_s=cpu_s,
            errors=dict(self.errors),
        )


class Connection(asyncio.Protocol):
    """One client: it sends the next request as soon as it has the last byte of the previous response."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._transport: asyncio.Transport
        self._scanner = ResponseScanner()
        self._sent = 0
        self._sent_at = self._last_event_at = 0.0
        self._ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports behave as asyncio.Transport without inheriting from it.
        self._transport = cast(asyncio.Transport, transport)

    def send(self) -> None:
        self._scanner = ResponseScanner()
        self._sent += 1
        self._sent_at = perf_counter()
        self._last_event_at = 0.0
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        scanner = self._scanner
        events = scanner.feed(data)
        if events:
            self._note_events(now, events)
        if scanner.complete:
            self._finish_request(now)
        elif scanner.status > 200:
            self._end(f"status {scanner.status}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("connection lost")

    def hang_up(self) -> None:
        self._end("")

    def _note_events(self, now: float, events: int) -> None:
        load = self._load
        load.events += events
        load.merged += events - 1
        if self._last_event_at:
            load.gaps.append(now - self._last_event_at)
        else:
            load.ttfts.append(now - self._sent_at)
            if self._sent == 1:
                load.note_open()
        self._last_event_at = now

    def _finish_request(self, now: float) -> None:
        load = self._load
        tokens = self._scanner.completion_tokens()
        if self._scanner.status != 200 or tokens is None:
            self._end(f"status {self._scanner.status} without usage")
            return
        load.requests += 1
        load.tokens += tokens
        load.durations.append(now - self._sent_at)
        load.finished = now
        if load.may_start(self._sent):
            self.send()
        else:
            self._end("")

    def _end(self, error: str) -> None:
        if self._ended:
            return
        self._ended = True
        if error:
            self._load.errors[error] += 1
        self._load.note_done()
        self._transport.close()


async def connect(load: Load) -> list[Connection]:
    loop = asyncio.get_running_loop()
    connections: list[Connection] = []
    while len(connections) < load.spec.streams:
        batch = min(CONNECT_BATCH, load.spec.streams - len(connections))
        pairs = await asyncio.gather(
            *(loop.create_connection(lambda: Connection(load), HOST, load.spec.port) for _ in range(batch))
        )
        connections.extend(connection for _, connection in pairs)
    return connections


async def drive(load: Load, connections: Sequence[Connection]) -> None:
    load.started = load.finished = perf_counter()
    for connection in connections:
        connection.send()
    if load.spec.hold_s:
        await load.all_open.wait()
        await asyncio.sleep(load.spec.hold_s)
    else:
        await load.all_done.wait()


async def run_load(spec: LoadSpec) -> LoadResult:
    if not spec.stalled_tokens:
        return await run_streams(Load(spec))
    client = StalledClient(spec.port, spec.stalled_tokens)
    try:
        stable = await client.wait_until_stable(spec.stall_lead_s, spec.server_pids)
        result = await run_streams(Load(spec))
        response = client.read_queued()
    finally:
        client.close()
    streamed = response.startswith(b"HTTP/1.1 200 ")
    return msgspec.structs.replace(
        result,
        # A response that fits into the buffers cannot delay other streams.
        stalled_full=stable and not response.endswith(END_OF_BODY),
        stalled_unread_bytes=len(response),
        errors=result.errors if streamed else result.errors | {f"stalled client: {response[:16]!r}": 1},
    )


async def run_streams(load: Load) -> LoadResult:
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        connections = await connect(load)
    await asyncio.sleep(ACCEPT_S)
    cpu_before = process_time()
    try:
        async with asyncio.timeout(load.spec.request_timeout_s):
            await drive(load, connections)
    except TimeoutError:
        load.errors["timeout"] += load.unfinished()
    cpu_s = process_time() - cpu_before
    for connection in connections:
        connection.hang_up()
    return load.result(cpu_s)


def raise_descriptor_limit() -> None:
    """Let this process and its children open as many sockets as the machine allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    raise_descriptor_limit()
    spec = msgspec.json.decode(sys.argv[1], type=LoadSpec)
    result = uvloop.run(run_load(spec))
    print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    main()
