"""Load, KV events and process deaths of a running SGLang, read on a thread.

The event loop never waits for shared memory: a scheduler that is stopped may hold its lock.
"""

import asyncio
import json
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from baton.engine_kit.threads import post
from baton.engines.sglang.kv_events import RankEvents
from baton.engines.sglang.sglang_types import Snapshot, SnapshotReader
from baton.engines.sglang.tcp_ports import free_port
from baton.errors import ConfigError
from baton.protocol.events import KvEvent, LoadSnapshot, Reading

if TYPE_CHECKING:
    import zmq  # type: ignore[import-not-found, unused-ignore]

LOAD_INTERVAL_S = 0.25
POLL_MS = 100
LOOPBACK = "127.0.0.1"
MAX_TRIES = 50
STOP_S = 2.0
FROZEN_S = 10.0  # as long as discovery keeps a worker that is frozen itself
STOPPED = "T"
GONE = ("", "Z", "X")
FIRST_LOAD_S = 15.0

log = logging.getLogger(__name__)


class Update(NamedTuple):
    """What one poll has read: KV events in order, the load of each rank, and the steps since the last poll."""

    events: list[KvEvent]
    loads: list[LoadSnapshot]
    steps: int


class ReadingFeed:
    """Readings on their way to their one reader. Event-loop thread only."""

    def __init__(self) -> None:
        self.steps = 0
        self._events: deque[KvEvent] = deque()
        self._loads: dict[int, LoadSnapshot] = {}
        self._changed = asyncio.Event()
        self._ended = False

    def set_loads(self, loads: Iterable[LoadSnapshot]) -> None:
        """Replace the load of every rank."""
        self._loads = {load.dp_rank: load for load in loads}
        self._changed.set()

    def push(self, update: Update) -> None:
        """Add what a poll has read."""
        self.steps += update.steps
        self._events += update.events
        self._loads.update((load.dp_rank, load) for load in update.loads)
        self._changed.set()

    def end(self) -> None:
        """End the iteration after what has been pushed. Idempotent."""
        self._ended = True
        self._changed.set()

    async def read(self) -> AsyncGenerator[Reading, None]:
        """Yield every KV event, and the load of each rank whenever it has changed."""
        published: dict[int, LoadSnapshot] = {}
        while True:
            self._changed.clear()
            while self._events:
                yield self._events.popleft()
            for rank, load in tuple(self._loads.items()):
                if published.get(rank) != load:
                    published[rank] = load
                    yield load
            if self._events:
                continue
            if self._ended:
                return
            await self._changed.wait()


def load_of(snapshot: Snapshot, block_size: int) -> LoadSnapshot:
    """Return a rank's load. SGLang counts tokens; a partly used block counts as used."""
    return LoadSnapshot(
        running=snapshot.num_running_reqs,
        waiting=snapshot.num_waiting_reqs,
        used_blocks=-(-snapshot.num_used_tokens // block_size),
        total_blocks=snapshot.max_total_num_tokens // block_size,
        dp_rank=snapshot.dp_rank,
    )


async def first_loads(reader: SnapshotReader | None, timeout_s: float = FIRST_LOAD_S) -> list[Snapshot]:
    """Wait for the first load of every scheduler; return nothing if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while reader is not None and time.monotonic() < deadline:
        snapshots = await asyncio.to_thread(reader.read_all)
        if snapshots and all(snapshot.max_total_num_tokens for snapshot in snapshots):
            return list(snapshots)
        await asyncio.sleep(0.05)
    return []


class EventSockets:
    """One subscription for each rank of this machine. We bind and the publishers connect: no port is guessed."""

    def __init__(self, ranks: Iterable[int], given: str | None) -> None:
        import zmq

        self._context = zmq.Context()
        self.sockets: dict[int, zmq.Socket[bytes]] = {}
        self.config: str | None = None
        try:
            self._open(tuple(ranks), given)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        self._context.destroy(linger=0)
        self.sockets = {}

    def _open(self, ranks: tuple[int, ...], given: str | None) -> None:
        if not ranks:
            return
        if given is None:
            base = self._bind(ranks)
            self.config = json.dumps({"publisher": "zmq", "endpoint": f"tcp://{LOOPBACK}:{base}"})
        elif (endpoint := published_at(given)) is not None:
            for rank in ranks:
                self._subscribe(rank).connect(at_rank(endpoint, rank))

    def _bind(self, ranks: tuple[int, ...]) -> int:
        import zmq

        for _ in range(MAX_TRIES):
            base = free_port(LOOPBACK)
            try:
                for rank in ranks:
                    self._subscribe(rank).bind(f"tcp://{LOOPBACK}:{base + rank}")
            except zmq.ZMQError:
                for socket in self.sockets.values():
                    socket.close(linger=0)
                self.sockets.clear()
            else:
                return base
        raise ConfigError(f"no {len(ranks)} free ports in a row were found for KV events")

    def _subscribe(self, rank: int) -> "zmq.Socket[bytes]":
        import zmq

        socket = self._context.socket(zmq.SUB)
        socket.set_hwm(0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.sockets[rank] = socket
        return socket


def published_at(config: str) -> str | None:
    """Return the address of `--kv-events-config`, None if nothing is published here. Raises ConfigError."""
    try:
        parsed = json.loads(config)
        endpoint = str(parsed.get("endpoint", "tcp://*:5557"))
        publisher = parsed.get("publisher", "null")
    except (ValueError, AttributeError):
        raise ConfigError(f"--kv-events-config: {config!r} is not a JSON object") from None
    if publisher != "zmq":
        return None
    reachable = endpoint.replace("*", LOOPBACK).replace("0.0.0.0", LOOPBACK)
    if reachable == endpoint and endpoint.startswith("tcp://"):
        log.warning("SGLang sends its KV events to %s; Baton publishes none", endpoint)
        return None
    return reachable


def at_rank(endpoint: str, rank: int) -> str:
    """Return where a rank publishes: the port of rank 0 plus the rank."""
    base, colon, port = endpoint.rpartition(":")
    return f"{base}{colon}{int(port) + rank}" if rank and port.isdigit() else endpoint


class Watch:
    """The thread, started by the constructor. `on_update` and `on_death` are called on the event loop."""

    def __init__(
        self,
        reader: SnapshotReader | None,
        sockets: EventSockets,
        pids: Sequence[int],
        block_size: int,
        on_update: Callable[[Update], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._reader = reader
        self._sockets = sockets
        self._pids = tuple(pids)
        self._block_size = block_size
        self._on_update = on_update
        self._on_death = on_death
        self._ranks = {rank: RankEvents(rank, block_size) for rank in sockets.sockets}
        self._stamps: dict[int, float] = {}
        self._frozen = FrozenProcesses()
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="sglang-watch", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Return when the thread has ended, or waits for the lock of a scheduler that is stopped. Idempotent."""
        self._stop.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._ended.wait()

    def _main(self) -> None:
        try:
            self._poll_until_stopped()
        except Exception as error:  # noqa: BLE001 - without its watch the engine counts as dead
            post(self._loop, self._on_death, f"SGLang cannot be watched: {error!r}")
        finally:
            self._sockets.close()
            post(self._loop, self._ended.set)

    def _poll_until_stopped(self) -> None:
        import zmq

        poller = zmq.Poller()
        for socket in self._sockets.sockets.values():
            poller.register(socket, zmq.POLLIN)
        due = 0.0
        while not self._stop.is_set():
            events = self._events(poller)
            loads: list[LoadSnapshot] = []
            steps = 0
            if time.monotonic() >= due:
                due = time.monotonic() + LOAD_INTERVAL_S
                loads, steps = self._loads()
                self._check_processes()
            if events or steps:
                post(self._loop, self._on_update, Update(events, loads, steps))

    def _events(self, poller: "zmq.Poller") -> list[KvEvent]:
        """Wait for KV events for up to `POLL_MS`."""
        sockets = self._sockets.sockets
        if not sockets:
            self._stop.wait(POLL_MS / 1000)
            return []
        ready = dict(poller.poll(POLL_MS))
        return [event for rank, socket in sockets.items() if socket in ready for event in self._received(rank, socket)]

    def _received(self, rank: int, socket: "zmq.Socket[bytes]") -> list[KvEvent]:
        import zmq

        events: list[KvEvent] = []
        with suppress(zmq.Again):
            while True:
                match socket.recv_multipart(zmq.NOBLOCK):
                    case [_, number, payload]:
                        events += self._ranks[rank].read(int.from_bytes(number, "big"), payload)
        return events

    def _loads(self) -> tuple[list[LoadSnapshot], int]:
        snapshots = self._reader.read_all() if self._reader is not None else ()
        fresh = [snapshot for snapshot in snapshots if self._stamps.get(snapshot.dp_rank) != snapshot.timestamp]
        self._stamps.update((snapshot.dp_rank, snapshot.timestamp) for snapshot in fresh)
        return [load_of(snapshot, self._block_size) for snapshot in fresh if snapshot.max_total_num_tokens], len(fresh)

    def _check_processes(self) -> None:
        for pid in self._pids:
            problem = self._frozen.problem(pid, _state_of(pid), time.monotonic())
            if problem is not None:
                post(self._loop, self._on_death, f"SGLang's process {pid} {problem}")
                self._stop.set()


class FrozenProcesses:
    """Decides when a stopped process counts as dead. Pure: the caller passes state and time.

    The steps of other ranks hide it from the watchdog.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def problem(self, pid: int, state: str, now: float) -> str | None:
        """Return what is wrong with a process in `state`, the letter of /proc, "" if it does not exist."""
        if state in GONE:
            return "has died"
        if state != STOPPED:
            self._since.pop(pid, None)
            return None
        since = self._since.setdefault(pid, now)
        return f"has been stopped for {now - since:.0f} s" if now - since >= FROZEN_S else None


def _state_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as status:
            return status.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""
