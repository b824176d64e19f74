"""One SGLang in this process: started, watched and stopped. Knows no requests.

SGLang's tokenizer manager runs in this process, on our event loop; its schedulers and detokenizer are processes of
their own. We run its receiving loop: SGLang's own way installs signal handlers, and kills this process on a failure.
"""

import asyncio
import functools
import logging
import os
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from baton.config.engines import ExpertOptions, SglangOptions
from baton.engines.sglang.compat import choose_device
from baton.engines.sglang.engine_info import Facts, capabilities_of, engine_info, facts_of
from baton.engines.sglang.launch import Launch, close_sockets
from baton.engines.sglang.launch_mode import LaunchMode
from baton.engines.sglang.metrics import EngineMetrics
from baton.engines.sglang.readings import EventSockets, ReadingFeed, Watch, first_loads
from baton.engines.sglang.server_args import check_arguments, make_server_args
from baton.engines.sglang.sglang_types import Engine as SglangObject
from baton.engines.sglang.sglang_types import Manager
from baton.engines.sglang.tcp_ports import free_port, is_free
from baton.errors import BatonError, ConfigError, EngineDead
from baton.ports.engine import EngineInfo
from baton.protocol.events import LoadSnapshot, Reading

MAX_STARTS = 2

T = TypeVar("T")

log = logging.getLogger(__name__)


class Started(NamedTuple):
    """What a started SGLang consists of. `manager` is None on a node that follows another."""

    info: EngineInfo
    facts: Facts
    manager: Manager | None


class SglangHost:
    """Starts SGLang for the model in `model_dir`, and stops it. A process has one at a time.

    `args` are SGLang's own. The constructor imports SGLang, which takes seconds, and raises ConfigError for arguments
    that it does not accept.
    """

    def __init__(
        self,
        options: SglangOptions,
        args: tuple[str, ...],
        model_dir: Path,
        name: str,
        mode: LaunchMode,
        experts: ExpertOptions | None = None,
        from_encoders: bool = False,
    ) -> None:
        choose_device(args)
        self.options = options
        self.model_dir = model_dir
        self.mode = mode
        self.arguments = check_arguments(mode, options, args, model_dir, name, experts)
        self.capabilities = capabilities_of(mode, options, self.arguments, model_dir, from_encoders)
        self._name = name
        self._feed = ReadingFeed()
        self._metrics: EngineMetrics | None = None
        self._cleanup = AsyncExitStack()
        self._stopping = asyncio.Lock()
        self._dead: BatonError | None = None
        self._death = asyncio.Event()
        self._on_death: list[Callable[[BatonError], object]] = []
        self._stopped = False

    @property
    def steps(self) -> int:
        """Steps that the schedulers have published."""
        return self._feed.steps

    async def start(self) -> Started:
        """Start SGLang's processes and its receiving loop. Raises ConfigError or EngineDead.

        `stop` cleans up, also during a start and after one that failed.
        """
        engine, sockets = await self._start_processes()
        return await self._take_over(engine, sockets)

    def on_death(self, callback: Callable[[BatonError], object]) -> None:
        """Call `callback` when SGLang dies or is stopped; at once if it has."""
        if self._dead is not None:
            callback(self._dead)
        else:
            self._on_death.append(callback)

    def before_stop(self, callback: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Await `callback` when the engine stops, while its sockets are still open."""
        self._cleanup.push_async_callback(callback)

    def check_alive(self) -> None:
        """Raise EngineDead unless SGLang runs."""
        if self._dead is not None:
            raise self._dead

    def die(self, error: BatonError) -> None:
        """Mark SGLang as dead: everything that waits for it fails with `error`. The first reason stays."""
        if self._dead is None:
            self._dead = error
            if not self._stopped:
                log.error("%s", error.message)
            self._death.set()
            for callback in self._on_death:
                callback(error)
        self._feed.end()

    async def or_death(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns. Raises EngineDead when SGLang dies first."""
        task, death = asyncio.ensure_future(work), asyncio.ensure_future(self._death.wait())
        try:
            await asyncio.wait([task, death], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            assert self._dead is not None
            raise self._dead
        finally:
            for unfinished in (task, death):
                unfinished.cancel()
            await asyncio.wait([task, death])

    def metrics(self) -> str:
        """See `Engine.metrics`."""
        return self._metrics.text() if self._metrics is not None and self.options.metrics else ""

    async def readings(self) -> AsyncGenerator[Reading, None]:
        """See `Engine.readings`. Raises EngineDead when SGLang has died by itself."""
        async for reading in self._feed.read():
            yield reading
        if self._dead is not None and not self._stopped:
            raise self._dead

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._stopped = True
        self.die(EngineDead("the engine has stopped"))
        async with self._stopping:
            await self._cleanup.aclose()

    async def _start_processes(self) -> tuple[SglangObject, EventSockets]:
        """Start SGLang; once more if another process has taken its bootstrap port meanwhile."""
        self._handle_sigquit()
        metrics = self._metrics = EngineMetrics()
        self._cleanup.callback(metrics.close)
        for attempt in range(1, MAX_STARTS + 1):
            port = self._bootstrap_port()
            sockets, launch = self._prepare(port, metrics)
            try:
                return await launch.start(), sockets
            except EngineDead:
                if self._stopped or attempt == MAX_STARTS or port is None or is_free(self._bind_host, port):
                    raise
                log.warning("port %d was taken by another process; SGLang is started again with another", port)
                sockets.close()
                await launch.stop()
        raise AssertionError("the last start returns or raises")

    def _prepare(self, port: int | None, metrics: EngineMetrics) -> tuple[EventSockets, Launch]:
        ranks = () if self.mode.embedding else self.arguments.local_ranks
        sockets = EventSockets(ranks, self.arguments.values["kv_events_config"])
        more: dict[str, object] = {"kv_events_config": sockets.config} if sockets.config else {}
        if port is not None:
            more["disaggregation_bootstrap_port"] = port
        launch = Launch(functools.partial(make_server_args, self.arguments, more))
        metrics.directory = launch.directory
        self._cleanup.push_async_callback(launch.stop)
        self._cleanup.callback(sockets.close)
        return sockets, launch

    @property
    def _bind_host(self) -> str:
        return str(self.arguments.values["host"])

    def _bootstrap_port(self) -> int | None:
        """Return a free port for SGLang's bootstrap server, unless one was given or none is needed."""
        if self.mode.disaggregation != "prefill" or not self.arguments.leader:
            return None
        if "disaggregation_bootstrap_port" in self.arguments.given:
            given = int(self.arguments.values["disaggregation_bootstrap_port"])
            if not is_free(self._bind_host, given):
                raise ConfigError(f"--disaggregation-bootstrap-port: {given} is in use at {self._bind_host}")
            return None
        return free_port(self._bind_host)

    async def _take_over(self, engine: SglangObject, sockets: EventSockets) -> Started:
        """Run SGLang's tokenizer manager on our event loop, and watch its processes."""
        manager = engine.tokenizer_manager
        reader = manager.load_snapshot_reader if manager is not None else None
        if manager is not None:
            self._receive(manager)
        snapshots = await first_loads(reader)
        self.check_alive()
        facts = facts_of(engine, snapshots)
        info = engine_info(facts, self.mode, self.arguments, self.model_dir, self._name)
        ranks = range(self.arguments.dp_size) if manager is not None else ()
        self._feed.set_loads(LoadSnapshot(0, 0, 0, info.total_blocks, rank) for rank in ranks)
        pids = engine.get_all_child_pids()
        watch = Watch(reader, sockets, pids, facts.block_size, self._feed.push, self._on_failure)
        self._cleanup.push_async_callback(watch.stop)
        return Started(info, facts, manager)

    def _receive(self, manager: Manager) -> None:
        """Run SGLang's receiving loop."""
        self._cleanup.callback(close_sockets, manager)
        manager.event_loop = asyncio.get_running_loop()  # with one set, SGLang starts no loop of its own
        receiving = asyncio.create_task(manager.handle_loop(), name="sglang-receiving")
        self._cleanup.push_async_callback(_cancel, receiving)
        receiving.add_done_callback(self._on_receiving_done)

    def _handle_sigquit(self) -> None:
        """Treat SIGQUIT as a death: a process of SGLang that fails sends it to its parent."""
        loop = asyncio.get_running_loop()
        with suppress(ValueError, RuntimeError):  # only the main thread's loop can handle signals
            loop.add_signal_handler(signal.SIGQUIT, self._on_failure, "a process of SGLang has failed; see its log")
        self._cleanup.callback(_restore_process, loop)

    def _on_receiving_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.die(EngineDead(f"SGLang's tokenizer manager has failed: {task.exception()!r}"))

    def _on_failure(self, message: str) -> None:
        self.die(EngineDead(message))


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _restore_process(loop: asyncio.AbstractEventLoop) -> None:
    """Undo what a start has changed in this process."""
    with suppress(ValueError, RuntimeError):
        loop.remove_signal_handler(signal.SIGQUIT)
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
