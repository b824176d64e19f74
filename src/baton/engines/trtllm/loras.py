"""LoRA adapters by name.

The library reads an adapter from its directory with the first request that names it. It has no call to load or unload
one: its own cache does that.
"""

import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

from baton.engines.trtllm.compat import Library
from baton.errors import ConfigError, InvalidRequest
from baton.protocol.commands import ListLoras, LoadLora, Outcome, UnloadLora


class Loras:
    """The adapters that requests may name."""

    def __init__(self) -> None:
        self._paths: dict[str, tuple[int, Path]] = {}
        self._ids = itertools.count(1)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, in the order of loading."""
        return tuple(self._paths)

    def add_configured(self, paths: object) -> None:
        """Add the directories of `lora_config.lora_dir`, each under its own name. Raises ConfigError."""
        for path in paths if isinstance(paths, list) else ():
            try:
                self.add(Path(path).name, Path(path))
            except InvalidRequest as error:
                raise ConfigError(f"lora_config.lora_dir: {error.message}") from error

    async def execute(
        self, command: LoadLora | UnloadLora | ListLoras, wait_for_users: Callable[[str], Awaitable[None]]
    ) -> Outcome:
        """See `Engine.execute`. Unloading waits until no request uses the adapter."""
        match command:
            case LoadLora():
                self.add(command.name, Path(command.path))
                message = f"added {command.name}; it is read with its first request"
            case UnloadLora():
                self.remove(command.name)
                await wait_for_users(command.name)
                message = f"removed {command.name}"
            case ListLoras():
                message = f"{len(self._paths)} adapters"
        return Outcome(message=message, adapters=self.names)

    def add(self, name: str, path: Path) -> None:
        """Let requests use it. Raises InvalidRequest."""
        if name in self._paths:
            raise InvalidRequest(f"name: an adapter {name!r} is loaded already")
        if not path.is_dir():
            raise InvalidRequest(f"path: {path} is not a directory")
        self._paths[name] = (next(self._ids), path)

    def remove(self, name: str) -> None:
        """Let no further request use it. Its id is not used again, because the library may still cache the adapter.

        Raises InvalidRequest.
        """
        if self._paths.pop(name, None) is None:
            raise InvalidRequest(f"name: no adapter {name!r} is loaded")

    def request(self, name: str, library: Library) -> object:
        """Return the library's LoRARequest for `name`. Raises InvalidRequest."""
        if name not in self._paths:
            loaded = ", ".join(self.names) or "none"
            raise InvalidRequest(f"lora_name: no adapter {name!r} is loaded; loaded are: {loaded}")
        number, path = self._paths[name]
        return library.lora_request(lora_name=name, lora_int_id=number, lora_path=str(path))
