"""A fake deployment with its view in a thread, so that a test can change it while a browser looks."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from baton.views.server import ViewServer
from tests.view.fake_deployment import FakeDeployment

T = TypeVar("T")


class FakeThread:
    """Runs what a test asks for in the event loop of the deployment."""

    def __init__(self, fake: FakeDeployment) -> None:
        self.fake = fake
        self.loop = asyncio.new_event_loop()
        self.view = ViewServer(fake)
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return self.view.url

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        async def call() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(60)

    @contextmanager
    def running(self) -> Iterator["FakeThread"]:
        self._thread.start()
        self.run(self.fake.start)
        self.run(self.view.start)
        try:
            yield self
        finally:
            self.run(self.view.aclose)
            self.run(self.fake.stop)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(10)
            self.loop.close()
