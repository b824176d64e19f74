"""Where the event broker of one host listens: Unix sockets in the discovery directory."""

import os
from pathlib import Path

from baton.config.directories import discovery_directory
from baton.config.runtime import RuntimeOptions
from baton.errors import ConfigError

LONGEST_SOCKET_PATH = 107


class EventSockets:
    """Where the broker of a discovery directory listens. Only the user who owns the directory can connect."""

    def __init__(self, discovery: Path) -> None:
        self.directory = discovery / "events"
        self.lock = self.directory / "lock"
        self._publishers = self.directory / "publish"
        self._subscribers = self.directory / "subscribe"

    @property
    def publishers(self) -> str:
        """The endpoint that publishers connect to."""
        return f"ipc://{self._publishers}"

    @property
    def subscribers(self) -> str:
        """The endpoint that subscribers connect to."""
        return f"ipc://{self._subscribers}"

    @property
    def broker_url(self) -> str:
        """Both endpoints, as the runtime reads them."""
        return f"xsub={self.publishers} , xpub={self.subscribers}"

    def prepare(self) -> None:
        """Create the directory. Raises ConfigError when its path cannot be the address of a socket."""
        path = str(self._subscribers)
        if len(os.fsencode(path)) > LONGEST_SOCKET_PATH or "," in path or ";" in path:
            raise ConfigError(
                f"{path} cannot be the address of a socket (at most {LONGEST_SOCKET_PATH} bytes, no comma or"
                " semicolon); choose another directory with --runtime-directory"
            )
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def remove(self) -> None:
        """Remove the files of the sockets, which ZMQ leaves."""
        self._publishers.unlink(missing_ok=True)
        self._subscribers.unlink(missing_ok=True)


def event_sockets(options: RuntimeOptions) -> EventSockets | None:
    """Return where the broker for `options` listens; None without one: NATS is a broker, and hosts share no socket."""
    if options.discovery == "file" and options.events == "zmq":
        return EventSockets(discovery_directory(options).absolute())
    return None
