"""The transport for production networks and GPU memory: NIXL reads the producer's memory, by RDMA where available.

NIXL checks no secret at a read: a peer with an agent's metadata can read all memory that the agent has registered. So
metadata is sent only to a consumer that has proved a secret. NIXL has no deadlines or leases either; both are ours.
"""

import asyncio
import functools
import importlib
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import ModuleType
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.errors import PeerLost
from baton.ports.transfer import BlockMemory, Channel
from baton.protocol.handoff import Ticket
from baton.transfer.block_copy import (
    Numbers,
    Spans,
    Stop,
    block_pairs,
    paired_spans,
    require_alike,
    require_sound,
    wait_for_thread,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

PACKAGES = ("nixl_cu12", "nixl_cu13")
# A NIXL request cannot be cancelled, so long reads are split: a cancellation takes effect between requests.
REQUEST_BYTES = 32 << 20
POLL_INTERVAL_S = 0.0001
# Wake-up interval of NIXL's progress thread, which answers peers; with 0 it would keep a core busy.
PROGRESS_INTERVAL_US = 1000
CANCEL_TIMEOUT_S = 1.0


class NixlDetails(msgspec.Struct, frozen=True):
    """What a consumer needs to connect."""

    agent: str
    metadata: bytes


def available() -> bool:
    """Whether NIXL is installed. Does not import it."""
    return any(find_spec(package) for package in PACKAGES)


class NixlServer:
    """Lets consumers read `memory`. Event-loop thread only."""

    name = "nixl"

    def __init__(self, memory: BlockMemory, start_timeout_s: float = 30.0) -> None:
        self._memory = memory
        self._start_timeout_s = start_timeout_s
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="baton-kv-nixl")
        self._agent: Agent | None = None
        self._lock = asyncio.Lock()

    async def open(self) -> dict[str, object]:
        """Return the name and metadata of this worker's agent, starting it at the first call. Raises PeerLost."""
        async with self._lock:
            if self._agent is None:
                start = functools.partial(Agent, self._memory, serves=True)
                self._agent = await _bounded(self._pool, start, self._start_timeout_s, "NIXL did not start")
        return {"agent": self._agent.name, "metadata": self._agent.metadata}

    async def close(self) -> None:
        """End the agent, and with it every read by consumers."""
        async with self._lock:
            if self._agent is not None:
                await asyncio.wrap_future(self._pool.submit(self._agent.close))
                self._agent = None
            self._pool.shutdown(wait=False)


class NixlClient:
    """Reads the memory of producers into `mine`. Event-loop thread only."""

    name = "nixl"

    def __init__(
        self, mine: BlockMemory, connect_timeout_s: float = 30.0, stall_timeout_s: float = 5.0, threads: int = 4
    ) -> None:
        self._mine = mine
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="baton-kv-nixl")
        self._agent: Agent | None = None
        self._lock = asyncio.Lock()

    async def connect(self, ticket: Ticket, memory: BlockMemory, details: dict[str, object]) -> Channel:
        """Load the producer's metadata into this worker's agent. Raises PeerLost."""
        require_sound(memory, memory.nbytes)
        require_alike(self._mine, memory)
        try:
            remote = msgspec.convert(details, NixlDetails)
        except msgspec.MsgspecError as error:
            raise PeerLost(f"the producer sent invalid transport details: {error}") from None
        channel = NixlChannel(
            self, self._pool, self._mine, memory, remote, self._connect_timeout_s, self._stall_timeout_s
        )
        await channel.connect()
        return channel

    async def agent(self) -> "Agent":
        """Return this worker's agent, starting one if there is none or the last one was retired. Raises PeerLost."""
        async with self._lock:
            if self._agent is None or self._agent.retired:
                start = functools.partial(Agent, self._mine, serves=False)
                self._agent = await _bounded(self._pool, start, self._connect_timeout_s, "NIXL did not start")
            return self._agent

    async def close(self) -> None:
        """End the agent."""
        async with self._lock:
            if self._agent is not None:
                await asyncio.wrap_future(self._pool.submit(self._agent.close))
                self._agent = None
            self._pool.shutdown(wait=False)


class NixlChannel:
    """One producer, as a peer of this worker's agent."""

    def __init__(
        self,
        client: NixlClient,
        pool: ThreadPoolExecutor,
        mine: BlockMemory,
        theirs: BlockMemory,
        remote: NixlDetails,
        connect_timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        self._client = client
        self._pool = pool
        self._mine = mine
        self._theirs = theirs
        self._remote = remote
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._agent: Agent | None = None
        self._closed = False

    async def connect(self) -> "Agent":
        """Return an agent that has loaded the producer's metadata. Raises PeerLost. Calls may run concurrently."""
        agent = await self._client.agent()
        if self._agent is not agent:
            add = functools.partial(agent.add, self._remote)
            problem = "the producer's metadata was not loaded"
            await _bounded(self._pool, add, self._connect_timeout_s, problem, lambda _: self._remove(agent))
            if self._agent is agent:
                self._remove(agent)  # another fetch has added it meanwhile, and `close` removes it once
            self._agent = agent
        return agent

    async def fetch(self, ticket: Ticket, theirs: Sequence[int], mine: Sequence[int]) -> None:
        """Read, in a thread. Cancelled, it returns when the running request has ended.

        NIXL cannot cancel a request whose peer is suspended: even when released it stays active, and writes when the
        peer resumes. If one has not ended in `stall_timeout_s`, or `CANCEL_TIMEOUT_S` after a cancellation, the whole
        agent is therefore retired: nothing can write once it is gone. Concurrent reads then fail with PeerLost, and the
        next one starts a new agent. A producer that resumes after this may end: over TCP, its UCX has been seen to
        abort.
        """
        source, target = block_pairs(self._theirs, theirs, self._mine, mine)
        if self._closed:
            raise PeerLost("the channel to the producer is closed")
        agent = await self.connect()
        stop = Stop()
        spans = paired_spans(self._theirs, source, self._mine, target)
        read = functools.partial(agent.read, self._remote.agent, self._theirs, *spans, self._stall_timeout_s, stop)
        try:
            await wait_for_thread(self._pool.submit(read), stop)
        except PeerLost:
            self._disconnect()
            raise

    def close(self) -> None:
        """Remove the producer from the agent."""
        self._closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        if self._agent is not None:
            self._remove(self._agent)
            self._agent = None

    def _remove(self, agent: "Agent") -> None:
        """Undo one `add`. A retired agent ends with everything that it has loaded, and its threads may have ended."""
        if not agent.retired:
            self._pool.submit(agent.remove, self._remote.agent)


class Agent:
    """One NIXL agent with one registered memory. Its methods block; any thread may call them.

    Its name is unique: peers refuse another agent with a name that they know.
    """

    def __init__(self, memory: BlockMemory, *, serves: bool) -> None:
        self._nixl = _bindings()
        self._memory = memory
        self.name = f"baton-{secrets.token_hex(12)}"
        self.retired = False
        self._peers: Counter[str] = Counter()
        self._reading = 0
        self._changed = threading.Condition()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = serves
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = PROGRESS_INTERVAL_US
        try:
            self._native = self._nixl.nixlAgent(self.name, config)
            self._native.createBackend("UCX", {})
            kind, device = self._place(memory)
            self._registered = self._nixl.nixlRegDList(kind, [(memory.address, memory.nbytes, device, b"kv")])
            self._native.registerMem(self._registered, [])
            self.metadata: bytes = self._native.getLocalMD()
        except Exception as error:
            raise PeerLost(f"NIXL cannot use this KV cache: {error!r}") from error

    def add(self, remote: NixlDetails) -> None:
        """Load the metadata of a producer. Raises PeerLost."""
        with self._changed:
            self._require_alive()
            try:
                name = self._native.loadRemoteMD(remote.metadata).decode()
            except Exception as error:
                raise PeerLost(f"the metadata of the producer's agent cannot be loaded: {error!r}") from error
            self._peers[name] += 1
        if name != remote.agent:
            self.remove(name)
            raise PeerLost(f"the producer's agent is called {name}, not {remote.agent}")

    def remove(self, name: str) -> None:
        """Remove a producer when no channel uses it."""
        with self._changed:
            self._peers[name] -= 1
            if self._peers[name] > 0 or self.retired:
                return
            del self._peers[name]
            _log_errors(lambda: self._native.invalidateRemoteMD(name))

    def read(
        self, name: str, theirs: BlockMemory, source: Spans, target: Spans, stall_timeout_s: float, stop: Stop
    ) -> None:
        """Read `source` of a producer into `target`. Raises PeerLost. After return nothing is written."""
        with self._changed:
            self._require_alive()
            self._reading += 1
        try:
            for part in _requests(target.lengths):
                remote = self._list(theirs, source, part)
                local = self._list(self._memory, target, part)
                self._request(name, local, remote, stall_timeout_s, stop)
                if stop.is_set():
                    return
        finally:
            with self._changed:
                self._reading -= 1
                self._end_if_unused()
                if self.retired:
                    self._changed.wait_for(lambda: self._native is None)

    def close(self) -> None:
        """End the agent when its running reads have ended."""
        with self._changed:
            self.retired = True
            self._end_if_unused()

    def _request(self, name: str, local: object, remote: object, stall_timeout_s: float, stop: Stop) -> None:
        """Make one request and wait for its end, or retire this agent."""
        try:
            handle = self._native.createXferReq(self._nixl.NIXL_READ, local, remote, name, b"", [])
        except Exception as error:
            raise PeerLost(f"NIXL cannot read the producer's memory: {error!r}") from error
        has_ended = False
        try:
            deadline = time.monotonic() + stall_timeout_s
            state = self._native.postXferReq(handle, b"")
            while state == self._nixl.NIXL_IN_PROG:
                if stop.is_set():
                    deadline = min(deadline, time.monotonic() + CANCEL_TIMEOUT_S)
                if self.retired or time.monotonic() > deadline:
                    raise PeerLost("the producer did not answer in time")
                time.sleep(POLL_INTERVAL_S)
                state = self._native.getXferStatus(handle)
            has_ended = True
            if state != self._nixl.NIXL_SUCCESS:
                raise PeerLost(f"the NIXL read failed: {state}")
        except PeerLost:
            raise
        except Exception as error:
            has_ended = True  # NIXL reports a broken connection
            raise PeerLost(f"the NIXL connection to the producer failed: {error!r}") from error
        finally:
            if not has_ended:
                self.retired = True
            _log_errors(lambda: self._native.releaseXferReq(handle))

    def _require_alive(self) -> None:
        if self.retired:
            raise PeerLost("the NIXL agent is restarting after a producer that did not answer")

    def _end_if_unused(self) -> None:
        if self.retired and not self._reading and self._native is not None:
            for name in self._peers:
                _log_errors(functools.partial(self._native.invalidateRemoteMD, name))
            _log_errors(lambda: self._native.deregisterMem(self._registered, []))
            self._native = None  # the last reference: the agent ends here
            self._changed.notify_all()

    def _list(self, memory: BlockMemory, spans: Spans, part: slice) -> object:
        """Return the NIXL descriptors of some spans: address, length, device."""
        kind, device = self._place(memory)
        addresses, lengths = spans.addresses[part], spans.lengths[part]
        rows: NDArray[np.uint64] = np.stack((addresses, lengths, np.full_like(lengths, device)), 1).astype(np.uint64)
        return self._nixl.nixlXferDList(kind, rows)

    def _place(self, memory: BlockMemory) -> tuple[object, int]:
        """Return the kind of memory and its device number."""
        name, _, number = memory.device.partition(":")
        return (self._nixl.DRAM_SEG if name == "cpu" else self._nixl.VRAM_SEG), int(number or 0)


def _requests(lengths: Numbers) -> Iterator[slice]:
    """Group spans into requests of limited size; a single longer span is not split."""
    if not len(lengths):
        return
    groups = (np.cumsum(lengths) - lengths) // REQUEST_BYTES
    starts = np.concatenate(([0], np.flatnonzero(np.diff(groups)) + 1)).tolist()
    for start, end in zip(starts, [*starts[1:], len(lengths)], strict=True):
        yield slice(start, end)


async def _bounded(
    pool: ThreadPoolExecutor,
    work: Callable[[], T],
    limit_s: float,
    problem: str,
    undo: Callable[[T], object] = lambda _: None,
) -> T:
    """Run `work` in a thread; after `limit_s` stop waiting for it.

    After a timeout or a cancellation `undo` is called with what `work` returns in the end.
    """
    future = asyncio.wrap_future(pool.submit(work))
    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.shield(future)
    except BaseException as error:
        future.add_done_callback(lambda ended: _discard(ended, undo))
        if isinstance(error, TimeoutError):
            raise PeerLost(f"{problem} within {limit_s:g} s") from None
        raise


def _discard(future: asyncio.Future[T], undo: Callable[[T], object]) -> None:
    """Undo what has been done, or mark the error as retrieved."""
    if not future.cancelled() and future.exception() is None:
        undo(future.result())


def _log_errors(clean_up: Callable[[], object]) -> None:
    """Run `clean_up`; errors are only logged."""
    try:
        clean_up()
    except Exception as error:  # noqa: BLE001 - NIXL errors share no base class, and the resource is dropped anyway
        log.debug("NIXL while cleaning up: %r", error)


def _bindings() -> ModuleType:
    # An abandoned request makes UCX warn once for every part of it.
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    package = next((name for name in PACKAGES if find_spec(name)), None)
    if package is None:
        raise PeerLost("NIXL is not installed")
    return importlib.import_module(f"{package}._bindings")
