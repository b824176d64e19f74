"""A thread that computes: it makes steps while there are any and obeys commands between two of them.

event loop                                 engine thread
start ───────────────────────────────────► make()                 the result, or its error, comes back
tell, ask ──► commands ──────────────────► between two steps      what `ask` asked comes back as a future
on_news ◄── call_soon_threadsafe ◄──────── take_news() once a step
on_end  ◄── call_soon_threadsafe ◄──────── when a step raises, or after `stop`
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
N = TypeVar("N")
N_co = TypeVar("N_co", covariant=True)


class Stepper(Protocol[N_co]):
    """What the thread drives; only ever touched from the thread."""

    @property
    def busy(self) -> bool:
        """Whether there is a step to make."""

    def step(self) -> None:
        """Make one. What it raises ends the thread."""

    def tick(self) -> None:
        """Called now and then while there is none: a sign of life."""

    def take_news(self) -> N_co | None:
        """Return what the event loop must know, if anything, since the last call."""

    def close(self) -> None:
        """Give up what would outlive the thread; the last call."""


S = TypeVar("S", bound=Stepper[object])


class EngineThread(Generic[S, N]):
    """Owns the thread. Every method is called from the event loop."""

    def __init__(self, on_news: Callable[[N], None], on_end: Callable[[BaseException | None], None]) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_news = on_news
        self._on_end = on_end
        self._commands: queue.SimpleQueue[Callable[[S], None] | None] = queue.SimpleQueue()
        self._answers: set[asyncio.Future[Any]] = set()
        self._ended = asyncio.Event()
        self._thread: threading.Thread | None = None

    async def start(self, name: str, make: Callable[[], S]) -> S:
        """Run `make` on the new thread and return its result; from then on steps are made. Raises what it raises."""
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[S] = self._loop.create_future()
        # A daemon: a step that never ends must not keep the process from ending.
        self._thread = threading.Thread(target=self._main, args=(make, ready), name=name, daemon=True)
        self._thread.start()
        return await ready

    def tell(self, command: Callable[[S], None]) -> None:
        """Have `command` done before the next step."""
        self._commands.put(command)

    async def ask(self, question: Callable[[S], T]) -> T:
        """Have `question` answered before the next step. Raises what it raises, and EngineDead."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def command(stepper: S) -> None:
            try:
                result = question(stepper)
            except Exception as error:  # noqa: BLE001 - it goes to who asked
                self.post(fail, answer, error)
            else:
                self.post(resolve, answer, result)

        if self._thread is None or self._ended.is_set():
            raise EngineDead("the engine is not running")
        self._answers.add(answer)
        self._commands.put(command)
        try:
            return await answer
        finally:
            self._answers.discard(answer)

    async def stop(self) -> None:
        """End the thread after the step it is in, and wait for that. Idempotent."""
        if self._thread is not None:
            self._commands.put(None)
            await self._ended.wait()

    def _main(self, make: Callable[[], S], ready: asyncio.Future[S]) -> None:
        problem: BaseException | None = None
        try:
            stepper = make()
        except BaseException as error:  # noqa: BLE001 - it goes to who started the thread
            self.post(fail, ready, error)
        else:
            self.post(resolve, ready, stepper)
            try:
                self._work(stepper)
            except BaseException as error:  # noqa: BLE001 - it goes to who owns the thread
                problem = error
        self.post(self._finish, problem)

    def _work(self, stepper: S) -> None:
        try:
            while self._execute(stepper):
                if stepper.busy:
                    stepper.step()
                self._tell_news(stepper)
        finally:
            stepper.close()

    def _execute(self, stepper: S) -> bool:
        """Do every command that has come; with no step to make, wait for one. Return False when told to stop."""
        while True:
            try:
                command = self._commands.get(block=not stepper.busy, timeout=IDLE_TICK_S)
            except queue.Empty:
                if not stepper.busy:
                    stepper.tick()
                return True
            if command is None:
                return False
            command(stepper)
            if not stepper.busy:
                self._tell_news(stepper)

    def _tell_news(self, stepper: S) -> None:
        news = stepper.take_news()
        if news is not None:
            self.post(self._on_news, news)

    def _finish(self, problem: BaseException | None) -> None:
        self._ended.set()
        for answer in self._answers:
            fail(answer, EngineDead("the engine has stopped"))
        self._on_end(problem)

    def post(self, callback: Callable[..., None], *args: object) -> None:
        """Have the event loop call `callback`, from any thread; a loop that has ended calls nothing."""
        if self._loop is not None:
            post(self._loop, callback, *args)
