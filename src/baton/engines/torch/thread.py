"""A thread that computes steps and runs functions between two of them.

event loop                                 engine thread
start ───────────────────────────────────► load()                 its result or its error is returned
submit, call ──► queue ──────────────────► between two steps      `call` returns the result
on_result ◄── call_soon_threadsafe ◄────── take_result() after each step
on_end    ◄── call_soon_threadsafe ◄────── when a step raises, or after `stop`
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from baton.engine_kit.threads import fail, post, resolve
from baton.errors import EngineDead

IDLE_TICK_S = 1.0

T = TypeVar("T")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Stepper(Protocol[R_co]):
    """What the thread drives; used from that thread only."""

    @property
    def busy(self) -> bool:
        """Whether a step can be computed."""

    def step(self) -> None:
        """Compute one step. An exception ends the thread."""

    def tick(self) -> None:
        """Called about once a second while there is no step, as a sign of life."""

    def take_result(self) -> R_co | None:
        """Return what is new for the event loop since the last call, if anything."""

    def close(self) -> None:
        """Free what would outlive the thread; the last call."""


S = TypeVar("S", bound=Stepper[object])


class EngineThread(Generic[S, R]):
    """One thread, created and used from the event loop; `start` is called once, before anything else."""

    def __init__(self, on_result: Callable[[R], None], on_end: Callable[[BaseException | None], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_result = on_result
        self._on_end = on_end
        self._queue: queue.SimpleQueue[Callable[[S], None] | None] = queue.SimpleQueue()
        self._calls: set[asyncio.Future[Any]] = set()
        self._ended = asyncio.Event()

    async def start(self, name: str, load: Callable[[], S]) -> S:
        """Run `load` on the new thread and return its result; steps begin then. Raises what `load` raises."""
        ready: asyncio.Future[S] = self._loop.create_future()
        # A daemon: a step that never ends must not keep the process from ending.
        threading.Thread(target=self._main, args=(load, ready), name=name, daemon=True).start()
        return await ready

    def submit(self, function: Callable[[S], None]) -> None:
        """Run `function` before the next step."""
        self._queue.put(function)

    async def call(self, function: Callable[[S], T]) -> T:
        """Run `function` before the next step and return its result. Raises what it raises, and EngineDead."""
        if self._ended.is_set():
            raise EngineDead("the engine is not running")
        done: asyncio.Future[T] = self._loop.create_future()

        def run(stepper: S) -> None:
            try:
                result = function(stepper)
            except Exception as error:  # noqa: BLE001 - raised in the caller
                self.post(fail, done, error)
            else:
                self.post(resolve, done, result)

        self._calls.add(done)
        self._queue.put(run)
        try:
            return await done
        finally:
            self._calls.discard(done)

    async def stop(self) -> None:
        """End the thread after its current step and wait for that. Idempotent."""
        self._queue.put(None)
        await self._ended.wait()

    def post(self, callback: Callable[..., None], *args: object) -> None:
        """Call `callback` on the event loop, from any thread; nothing happens if the loop has closed."""
        post(self._loop, callback, *args)

    def _main(self, load: Callable[[], S], ready: asyncio.Future[S]) -> None:
        problem: BaseException | None = None
        try:
            stepper = load()
        except BaseException as error:  # noqa: BLE001 - raised by `start`
            self.post(fail, ready, error)
        else:
            self.post(resolve, ready, stepper)
            try:
                self._step_until_stopped(stepper)
            except BaseException as error:  # noqa: BLE001 - passed to `on_end`
                problem = error
        self.post(self._finish, problem)

    def _step_until_stopped(self, stepper: S) -> None:
        try:
            while self._run_queued(stepper):
                if stepper.busy:
                    stepper.step()
                self._post_result(stepper)
        finally:
            stepper.close()

    def _run_queued(self, stepper: S) -> bool:
        """Run every queued function; without a step to compute, wait for one. Return False to stop."""
        while True:
            try:
                function = self._queue.get(block=not stepper.busy, timeout=IDLE_TICK_S)
            except queue.Empty:
                if not stepper.busy:
                    stepper.tick()
                return True
            if function is None:
                return False
            function(stepper)
            if not stepper.busy:
                self._post_result(stepper)

    def _post_result(self, stepper: S) -> None:
        result = stepper.take_result()
        if result is not None:
            self.post(self._on_result, result)

    def _finish(self, problem: BaseException | None) -> None:
        self._ended.set()
        for done in self._calls:
            fail(done, EngineDead("the engine has stopped"))
        self._on_end(problem)
