"""What `baton serve` shows to the person who started it."""

from typing import Protocol

from baton.config.settings import Settings


class Terminal(Protocol):
    """Shows the life of a `baton serve`. Called in the event loop; returns soon."""

    def starting(self, settings: Settings) -> None:
        """The model is there, and processes are about to be started."""

    def ready(self, process: str, after_s: float, url: str) -> None:
        """A process is ready. `url` is that of its system server, "" without one."""

    def serving(self, settings: Settings, view_url: str | None) -> None:
        """A first request has been answered. `view_url` is that of the web view, None if it is off."""

    def stopping(self, text: str) -> None:
        """`text` is a line about what the stop waits for."""
