"""What SGLang tells while it runs, read on a thread: load from shared memory, KV events from sockets, signs of death.

Nothing here waits on the event loop, for a scheduler that is stopped may hold the lock of its shared memory.
"""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from baton.engine_kit.threads import post
from baton.engines.sglang.sglang_types import Snapshot, SnapshotReader
from baton.engines.sglang.kv_events import RankEvents
from baton.engines.sglang.tcp_ports import free_port
from baton.errors import ConfigError
from baton.protocol.events import KvEvent, LoadSnapshot

if TYPE_CHECKING:
    import zmq  # type: ignore[import-not-found, unused-ignore]

LOAD_EVERY_S = 0.25
POLL_MS = 100
LOOPBACK = "127.0.0.1"
TRIES = 50
FIRST_S = 15.0

log = logging.getLogger(__name__)


class News(NamedTuple):
    """What one look has found: events in order, the load of each rank, and how many steps were made since."""

    events: list[KvEvent]
    loads: list[LoadSnapshot]
    steps: int


def load_of(snapshot: Snapshot, page: int) -> LoadSnapshot:
    """Return a rank's load. SGLang counts tokens; a block that is partly used is used."""
    return LoadSnapshot(
        running=snapshot.num_running_reqs,
        waiting=snapshot.num_waiting_reqs,
        used_blocks=-(-snapshot.num_used_tokens // page),
        total_blocks=snapshot.max_total_num_tokens // page,
        dp_rank=snapshot.dp_rank,
    )


async def first_loads(reader: SnapshotReader | None, limit_s: float = FIRST_S) -> list[Snapshot]:
    """Return what every scheduler has told of itself when it began; nothing, if it takes too long."""
    deadline = time.monotonic() + limit_s
    while reader is not None and time.monotonic() < deadline:
        snapshots = await asyncio.to_thread(reader.read_all)
        if snapshots and all(snapshot.max_total_num_tokens for snapshot in snapshots):
            return list(snapshots)
        await asyncio.sleep(0.05)
    return []


class EventSockets:
    """One subscription for each rank of this machine. The publishers come to us: so no port has to be guessed."""

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
        """Give the sockets up. Idempotent."""
        self.sockets = {}
        self._context.destroy(linger=0)

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

        for _ in range(TRIES):
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
    """Return where a person lets SGLang publish, if there is anything to hear. Raises ConfigError."""
    try:
        said = json.loads(config)
        endpoint = str(said.get("endpoint", "tcp://*:5557"))
        publisher = said.get("publisher", "null")
    except (ValueError, AttributeError):
        raise ConfigError(f"--kv-events-config: {config!r} is not a JSON object") from None
    if publisher != "zmq":
        return None
    reachable = endpoint.replace("*", LOOPBACK).replace("0.0.0.0", LOOPBACK)
    if reachable == endpoint and endpoint.startswith("tcp://"):
        log.warning("SGLang sends its KV events to %s; Baton tells none", endpoint)
        return None
    return reachable


def at_rank(endpoint: str, rank: int) -> str:
    """Return where a rank publishes: each has the port after the one before."""
    base, colon, port = endpoint.rpartition(":")
    return f"{base}{colon}{int(port) + rank}" if rank and port.isdigit() else endpoint


class Watch:
    """The thread. It begins when made; `on_news` and `on_death` are called on the event loop."""

    def __init__(
        self,
        reader: SnapshotReader | None,
        sockets: EventSockets,
        pids: Sequence[int],
        page: int,
        on_news: Callable[[News], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._reader = reader
        self._sockets = sockets
        self._pids = tuple(pids)
        self._page = page
        self._on_news = on_news
        self._on_death = on_death
        self._ranks = {rank: RankEvents(rank, page) for rank in sockets.sockets}
        self._stamps: dict[int, float] = {}
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="sglang-watch", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Return when the thread has ended. Idempotent."""
        self._stop.set()
        await self._ended.wait()

    def _main(self) -> None:
        try:
            self._look_until_stopped()
        except Exception as error:  # noqa: BLE001 - the engine without its watch is as good as dead
            post(self._loop, self._on_death, f"SGLang cannot be watched: {error!r}")
        finally:
            self._sockets.close()
            post(self._loop, self._ended.set)

    def _look_until_stopped(self) -> None:
        import zmq

        poller = zmq.Poller()
        for socket in self._sockets.sockets.values():
            poller.register(socket, zmq.POLLIN)
        due = 0.0
        while not self._stop.is_set():
            if self._sockets.sockets:
                ready = dict(poller.poll(POLL_MS))
            else:
                ready = {}
                self._stop.wait(POLL_MS / 1000)
            events = [
                event
                for rank, socket in self._sockets.sockets.items()
                if socket in ready
                for event in self._heard(rank, socket)
            ]
            loads: list[LoadSnapshot] = []
            steps = 0
            if time.monotonic() >= due:
                due = time.monotonic() + LOAD_EVERY_S
                loads, steps = self._loads()
                self._look_for_the_dead()
            if events or steps:
                post(self._loop, self._on_news, News(events, loads, steps))

    def _heard(self, rank: int, socket: "zmq.Socket[bytes]") -> list[KvEvent]:
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
        return [load_of(snapshot, self._page) for snapshot in fresh if snapshot.max_total_num_tokens], len(fresh)

    def _look_for_the_dead(self) -> None:
        for pid in self._pids:
            if not _lives(pid):
                post(self._loop, self._on_death, f"SGLang's process {pid} has died")
                self._stop.set()


def _lives(pid: int) -> bool:
    """Whether a process is there and has not ended; one that has ended waits to be asked why."""
    try:
        with open(f"/proc/{pid}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
