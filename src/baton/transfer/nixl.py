"""The way for production networks and GPU memory: NIXL reads the lender's memory, by RDMA where there is any.

It checks no secret at a read: who has the metadata of an agent can read all that it has registered, so metadata is told
only to who has proved a secret. Nor does it know deadlines or leases; both are ours.
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
from baton.ports.transfer import Channel, KvMemory
from baton.protocol.handoff import Ticket
from baton.transfer.block_copy import Numbers, Spans, Stop, block_pairs, paired_spans, require_alike, require_sound

log = logging.getLogger(__name__)

T = TypeVar("T")

PACKAGES = ("nixl_cu12", "nixl_cu13")
# One request of NIXL's cannot be ended, so what is long is cut: a cancellation is seen between the requests.
REQUEST_BYTES = 32 << 20
POLL_S = 0.0001
# NIXL's own thread, which answers peers, wakes this often; with 0 it would keep a core busy.
PROGRESS_US = 1000
CANCEL_S = 1.0


class NixlDetails(msgspec.Struct, frozen=True):
    """What a borrower needs to know."""

    agent: str
    metadata: bytes


def available() -> bool:
    """Whether NIXL is installed. Does not import it."""
    return any(find_spec(package) for package in PACKAGES)


class NixlServer:
    """Lets others read `memory`. Event-loop thread only."""

    name = "nixl"

    def __init__(self, memory: KvMemory, start_timeout_s: float = 30.0) -> None:
        self._memory = memory
        self._start_s = start_timeout_s
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="baton-kv-nixl")
        self._agent: Agent | None = None
        self._lock = asyncio.Lock()

    async def open(self) -> dict[str, object]:
        """Return the name and the metadata of our agent, which is started at the first call. Raises PeerLost."""
        async with self._lock:
            if self._agent is None:
                start = functools.partial(Agent, self._memory, answers=True)
                self._agent = await _bounded(self._pool, start, self._start_s, "NIXL did not start")
        return {"agent": self._agent.name, "metadata": self._agent.metadata}

    async def close(self) -> None:
        """End the agent, and with it every read of others."""
        async with self._lock:
            if self._agent is not None:
                await asyncio.wrap_future(self._pool.submit(self._agent.close))
                self._agent = None
            self._pool.shutdown(wait=False)


class NixlClient:
    """Reads the memory of others into `mine`. Event-loop thread only."""

    name = "nixl"

    def __init__(
        self, mine: KvMemory, connect_timeout_s: float = 30.0, stall_timeout_s: float = 5.0, threads: int = 4
    ) -> None:
        self._mine = mine
        self._connect_s = connect_timeout_s
        self._stall_s = stall_timeout_s
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="baton-kv-nixl")
        self._agent: Agent | None = None
        self._lock = asyncio.Lock()

    async def connect(self, ticket: Ticket, memory: KvMemory, details: dict[str, object]) -> Channel:
        """Introduce the lender's agent to ours. Raises PeerLost."""
        require_sound(memory, memory.nbytes)
        require_alike(self._mine, memory)
        try:
            told = msgspec.convert(details, NixlDetails)
        except msgspec.MsgspecError as error:
            raise PeerLost(f"the lender does not say how NIXL reads it: {error}") from None
        path = NixlChannel(self, self._pool, self._mine, memory, told, self._connect_s, self._stall_s)
        await path.meet()
        return path

    async def agent(self) -> "Agent":
        """Return our agent, starting one if there is none or the last one had to be given up. Raises PeerLost."""
        async with self._lock:
            if self._agent is None or self._agent.retired:
                start = functools.partial(Agent, self._mine, answers=False)
                self._agent = await _bounded(self._pool, start, self._connect_s, "NIXL did not start")
            return self._agent

    async def close(self) -> None:
        """End our agent."""
        async with self._lock:
            if self._agent is not None:
                await asyncio.wrap_future(self._pool.submit(self._agent.close))
                self._agent = None
            self._pool.shutdown(wait=False)


class NixlChannel:
    """One lender, as our agent knows it."""

    def __init__(
        self,
        connect: NixlClient,
        pool: ThreadPoolExecutor,
        mine: KvMemory,
        theirs: KvMemory,
        told: NixlDetails,
        connect_timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        self._reach = connect
        self._pool = pool
        self._mine = mine
        self._theirs = theirs
        self._told = told
        self._connect_s = connect_timeout_s
        self._stall_s = stall_timeout_s
        self._agent: Agent | None = None
        self._closed = False

    async def meet(self) -> "Agent":
        """Return an agent that knows the lender. Raises PeerLost."""
        agent = await self._reach.agent()
        if self._agent is not agent:
            add = functools.partial(agent.add, self._told)
            await _bounded(self._pool, add, self._connect_s, "the lender's agent was not met")
            self._agent = agent
        return agent

    async def fetch(self, ticket: Ticket, theirs: Sequence[int], mine: Sequence[int]) -> None:
        """Read, in a thread. Cancelled, it returns when the request that is on its way has ended.

        NIXL cannot end a request whose peer is stopped: released, it goes on in secret, and writes when the peer wakes
        up. One that has not ended in `stall_timeout_s`, or `CANCEL_S` after a cancellation, therefore costs us the
        whole agent: nothing can write once that is gone. Concurrent reads then fail with PeerLost, and the next
        one starts a new agent. A producer that wakes up after this may end: over TCP, its UCX has been seen to abort.
        """
        source, target = block_pairs(self._theirs, theirs, self._mine, mine)
        if self._closed:
            raise PeerLost("the path to the lender is closed")
        agent = await self.meet()
        stop = Stop()
        spans = paired_spans(self._theirs, source, self._mine, target)
        read = functools.partial(agent.read, self._told.agent, self._theirs, *spans, self._stall_s, stop)
        future = asyncio.wrap_future(self._pool.submit(read))
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            stop.set()
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue  # it still writes; the first cancellation is raised below
            future.exception()
            raise
        except PeerLost:
            self._leave()
            raise

    def close(self) -> None:
        """Have our agent forget the lender."""
        self._closed = True
        self._leave()

    def _leave(self) -> None:
        if self._agent is not None:
            self._pool.submit(self._agent.remove, self._told.agent)
            self._agent = None


class Agent:
    """One agent of NIXL's, with one registered memory. Blocks; any thread may call it.

    Its name is used once: peers refuse another agent of a name that they know.
    """

    def __init__(self, memory: KvMemory, *, answers: bool) -> None:
        self._nixl = _bindings()
        self._memory = memory
        self.name = f"baton-{secrets.token_hex(12)}"
        self.retired = False
        self._peers: Counter[str] = Counter()
        self._reading = 0
        self._changed = threading.Condition()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = answers
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = PROGRESS_US
        try:
            self._native = self._nixl.nixlAgent(self.name, config)
            self._native.createBackend("UCX", {})
            kind, device = self._place(memory)
            self._registered = self._nixl.nixlRegDList(kind, [(memory.address, memory.nbytes, device, b"kv")])
            self._native.registerMem(self._registered, [])
            self.metadata: bytes = self._native.getLocalMD()
        except Exception as error:
            raise PeerLost(f"NIXL cannot use this KV cache: {error!r}") from error

    def add(self, told: NixlDetails) -> None:
        """Get to know a lender. Raises PeerLost."""
        with self._changed:
            self._require_alive()
            try:
                name = self._native.loadRemoteMD(told.metadata).decode()
            except Exception as error:
                raise PeerLost(f"the lender's agent cannot be reached: {error!r}") from error
            self._peers[name] += 1
        if name != told.agent:
            self.remove(name)
            raise PeerLost(f"the lender's agent is called {name}, not {told.agent}")

    def remove(self, name: str) -> None:
        """Forget a lender, when nobody else needs it."""
        with self._changed:
            self._peers[name] -= 1
            if self._peers[name] > 0 or self.retired:
                return
            del self._peers[name]
            _quietly(lambda: self._native.invalidateRemoteMD(name))

    def read(
        self, name: str, theirs: KvMemory, source: Spans, target: Spans, stall_timeout_s: float, stop: Stop
    ) -> None:
        """Read `source`, of a lender, into `target`. Raises PeerLost. On return nothing is written any more."""
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
        """End the agent: when the reads that are on their way have ended, if there are any."""
        with self._changed:
            self.retired = True
            self._end_if_unused()

    def _request(self, name: str, local: object, remote: object, stall_timeout_s: float, stop: Stop) -> None:
        """Make one request and see it to its end, or retire this agent."""
        try:
            handle = self._native.createXferReq(self._nixl.NIXL_READ, local, remote, name, b"", [])
        except Exception as error:
            raise PeerLost(f"NIXL cannot read the lender: {error!r}") from error
        has_ended = False
        try:
            deadline = time.monotonic() + stall_timeout_s
            state = self._native.postXferReq(handle, b"")
            while state == self._nixl.NIXL_IN_PROG:
                if stop.is_set():
                    deadline = min(deadline, time.monotonic() + CANCEL_S)
                if self.retired or time.monotonic() > deadline:
                    raise PeerLost("the lender did not answer in time")
                time.sleep(POLL_S)
                state = self._native.getXferStatus(handle)
            has_ended = True
            if state != self._nixl.NIXL_SUCCESS:
                raise PeerLost(f"the read failed: {state}")
        except PeerLost:
            raise
        except Exception as error:
            has_ended = True  # NIXL says so: the connection is broken
            raise PeerLost(f"the lender is gone: {error!r}") from error
        finally:
            if not has_ended:
                self.retired = True
            _quietly(lambda: self._native.releaseXferReq(handle))

    def _require_alive(self) -> None:
        if self.retired:
            raise PeerLost("NIXL starts anew after a lender that did not answer")

    def _end_if_unused(self) -> None:
        if self.retired and not self._reading and self._native is not None:
            for name in self._peers:
                _quietly(functools.partial(self._native.invalidateRemoteMD, name))
            _quietly(lambda: self._native.deregisterMem(self._registered, []))
            self._native = None  # the last reference: it ends here
            self._changed.notify_all()

    def _list(self, memory: KvMemory, spans: Spans, part: slice) -> object:
        """The descriptors of some spans, as NIXL wants them: address, length, device."""
        kind, device = self._place(memory)
        addresses, lengths = spans.addresses[part], spans.lengths[part]
        rows: NDArray[np.uint64] = np.stack((addresses, lengths, np.full_like(lengths, device)), 1).astype(np.uint64)
        return self._nixl.nixlXferDList(kind, rows)

    def _place(self, memory: KvMemory) -> tuple[object, int]:
        """The kind of memory, and the number of its device."""
        name, _, number = memory.device.partition(":")
        return (self._nixl.DRAM_SEG if name == "cpu" else self._nixl.VRAM_SEG), int(number or 0)


def _requests(lengths: Numbers) -> Iterator[slice]:
    """Cut spans into requests that are not too long; a span that is longer stays whole."""
    if not len(lengths):
        return
    groups = (np.cumsum(lengths) - lengths) // REQUEST_BYTES
    starts = np.concatenate(([0], np.flatnonzero(np.diff(groups)) + 1)).tolist()
    for start, end in zip(starts, [*starts[1:], len(lengths)], strict=True):
        yield slice(start, end)


async def _bounded(pool: ThreadPoolExecutor, work: Callable[[], T], limit_s: float, complaint: str) -> T:
    """Do `work` in a thread; after `limit_s` it is waited for no longer."""
    future = asyncio.wrap_future(pool.submit(work))
    future.add_done_callback(_note)
    try:
        return await asyncio.wait_for(asyncio.shield(future), limit_s)
    except TimeoutError:
        raise PeerLost(f"{complaint} within {limit_s:g} s") from None


def _note(future: asyncio.Future[T]) -> None:
    """Look at how it ended, in case nobody else does any more."""
    if not future.cancelled():
        future.exception()


def _quietly(clean_up: Callable[[], object]) -> None:
    """Clean up; what NIXL complains about is logged only."""
    try:
        clean_up()
    except Exception as error:  # noqa: BLE001 - its errors share no base, and the thing is given up anyway
        log.debug("NIXL while cleaning up: %r", error)


def _bindings() -> ModuleType:
    # A request that is given up makes UCX warn once for every part of it.
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    package = next((name for name in PACKAGES if find_spec(name)), None)
    if package is None:
        raise PeerLost("NIXL is not installed")
    return importlib.import_module(f"{package}._bindings")
