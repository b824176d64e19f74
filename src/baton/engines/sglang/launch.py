"""Starting SGLang off the event loop, and ending all of it.

SGLang's processes are killed by the kernel when their parent dies, and to the kernel the parent is the *thread* that
made them. So one thread starts the engine, waits as long as it is needed, and takes it down.

event loop                          launch thread
start ───────────────────────────►  launch()        the engine, or its error, comes back
stop  ── killing what still starts, then ──►  close()
"""

import asyncio
import atexit
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.config.owned_directory import owned_directory
from baton.engine_kit.bound_children import children_bound_to_this_thread
from baton.engine_kit.threads import fail, post, resolve
from baton.engines.sglang.sglang_types import Engine, Manager, ServerArgs
from baton.errors import BatonError, ConfigError, EngineDead

if TYPE_CHECKING:
    import psutil

KILL_S = 20.0
KILL_EVERY_S = 0.5

log = logging.getLogger(__name__)


class Launch:
    """One start of SGLang. Every method is called from the event loop."""

    def __init__(self, make_args: Callable[[], ServerArgs]) -> None:
        self._files = ExitStack()
        self.directory = self._files.enter_context(owned_directory("sglang"))
        self._make_args = make_args
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Engine] = self._loop.create_future()
        self._over = asyncio.Event()
        self._stop = threading.Event()
        self._other_children = _children()
        self._ports: object = None  # set when SGLang starts processes
        # A daemon: an engine that cannot be stopped must not keep the process from exiting.
        self._thread = threading.Thread(target=self._main, name="sglang-launch", daemon=True)

    async def start(self) -> Engine:
        """Return the started engine. Raises ConfigError or EngineDead."""
        self._thread.start()
        return await asyncio.shield(self._ready)

    async def stop(self) -> None:
        """Return when no process, thread or file of the engine is left. Idempotent."""
        self._stop.set()
        while self._thread.ident is not None and not self._over.is_set():
            if not self._ready.done():
                # A start cannot be interrupted, but it fails when its processes do, each time that it makes some.
                await asyncio.to_thread(self._kill)
            with suppress(TimeoutError):
                async with asyncio.timeout(KILL_EVERY_S):
                    await self._over.wait()
        self._files.close()

    def _main(self) -> None:
        try:
            engine = self._launch()
        except BaseException as error:  # SGLang raises any type; it is raised again by `start`
            log.debug("SGLang did not start", exc_info=True)
            problem = self._problem(error)
            self._kill()
            if self._ports is not None:
                _remove_files(self._ports)
            post(self._loop, fail, self._ready, problem)
        else:
            post(self._loop, resolve, self._ready, engine)
            self._stop.wait()
            with suppress(Exception):
                _close(engine)
            self._kill()
            _remove_files(engine.port_args)
        post(self._loop, self._over.set)

    def _launch(self) -> Engine:
        """Start SGLang, and undo what it changes in this process. Blocks until the model is loaded."""
        from sglang.srt.entrypoints.engine import Engine as Foreign

        SglangEngine = self._recording_ports(Foreign)  # noqa: N806 - a class
        server_args = self._make_args()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(self.directory)
        os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
        engine = SglangEngine.__new__(SglangEngine)
        made: list[Manager] = []

        def make_manager(*args: Any) -> Any:
            manager, templates = SglangEngine.init_tokenizer_manager_func(*args)
            made.append(manager)
            return manager, templates

        engine.init_tokenizer_manager_func = make_manager
        with restored_settings(server_args.log_level), children_bound_to_this_thread(self.directory):
            try:
                SglangEngine.__init__(engine, server_args=server_args)
            except BaseException:
                with suppress(Exception):
                    _close(engine)
                for manager in made:
                    close_sockets(manager)
                    _close_bootstrap(manager)
                raise
        for manager in made:
            if manager._subprocess_watchdog is not None:
                manager._subprocess_watchdog.stop()  # it kills this process; `Watch` observes the processes
        started: Engine = engine
        return started

    def _recording_ports(self, base: Any) -> Any:
        """Return a subclass of SGLang's engine that records its ports when it starts processes."""

        def launch(cls: type[Any], server_args: object, ports: object, /, *more: object, **options: object) -> Any:
            self._ports = ports
            return base._launch_scheduler_processes.__func__(cls, server_args, ports, *more, **options)

        return type(base.__name__, (base,), {"_launch_scheduler_processes": classmethod(launch)})

    def _problem(self, error: BaseException) -> BatonError:
        """Translate the error of a failed start: before a process was started, only the arguments can be wrong."""
        if isinstance(error, BatonError):
            return error
        if self._ports is None and not self._processes():
            return ConfigError(f"SGLang does not start with these arguments: {error}")
        return EngineDead(f"SGLang did not start: {error}")

    def _processes(self) -> "list[psutil.Process]":
        """Return every process started since, with its descendants."""
        import psutil

        spared = self._other_children | {
            getattr(resource_tracker._resource_tracker, "_pid", None)
        }  # it ends with this process, and cleans up then
        return [child for child in psutil.Process().children(recursive=True) if child.pid not in spared]

    def _kill(self) -> None:
        import psutil

        mine = self._processes()
        for child in mine:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        if left := psutil.wait_procs(mine, timeout=KILL_S)[1]:
            log.error("processes %s of SGLang cannot be killed", [child.pid for child in left])


def close_sockets(manager: Manager) -> None:
    """Close the sockets of SGLang's tokenizer manager; on the event loop's thread, if it ran there."""
    for socket in (manager.recv_from_detokenizer, manager.send_to_scheduler):
        socket.close(linger=0)
    manager.recv_from_detokenizer.context.destroy(linger=0)
    manager.load_snapshot_reader.close()


def _close_bootstrap(manager: Manager | None) -> None:
    if manager is not None and manager.bootstrap_server is not None:
        manager.bootstrap_server.close()


def _close(engine: Engine) -> None:
    """Run SGLang's own shutdown without its killing of processes, then close what it leaves open."""
    from sglang.srt.entrypoints import engine as module

    atexit.unregister(engine.shutdown)
    kill = module.kill_process_tree
    # It would kill every child of this process, not only SGLang's.
    module.kill_process_tree = lambda *_, **__: None
    try:
        engine.shutdown()
    finally:
        module.kill_process_tree = kill
        _close_bootstrap(engine.tokenizer_manager)


def _remove_files(ports: object) -> None:
    """Remove the files of SGLang's sockets and shared memory."""
    from sglang.srt.managers.load_snapshot import shm_path_for

    names = vars(ports)
    for address in names.values():
        if isinstance(address, str) and address.startswith("ipc://"):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
    Path(shm_path_for(names["instance_id"])).unlink(missing_ok=True)


@contextmanager
def restored_settings(log_level: str) -> Iterator[None]:
    """Restore the settings of this process that SGLang replaces while it starts."""
    root = logging.getLogger()
    handlers, level, method = root.handlers[:], root.level, multiprocessing.get_start_method(allow_none=True)
    logging.getLogger("sglang").setLevel(log_level.upper())
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        multiprocessing.set_start_method(method, force=True)


def _children() -> frozenset[int]:
    import psutil

    return frozenset(child.pid for child in psutil.Process().children(recursive=True))
