"""LoRA adapters by name. The library reads one from its directory with the first request that names it, and has no
way to be told of one before, or to forget one: its own cache of adapters does that."""

import itertools
from pathlib import Path

from baton.engines.trtllm.compat import Library
from baton.errors import InvalidRequest


class Loras:
    """The names that requests may use."""

    def __init__(self) -> None:
        self._paths: dict[str, tuple[int, Path]] = {}
        self._ids = itertools.count(1)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, in the order in which they came."""
        return tuple(self._paths)

    def add(self, name: str, path: Path) -> None:
        """Take one in. Raises InvalidRequest."""
        if name in self._paths:
            raise InvalidRequest(f"name: an adapter {name!r} is loaded already")
        if not path.is_dir():
            raise InvalidRequest(f"path: {path} is not a directory")
        self._paths[name] = (next(self._ids), path)

    def remove(self, name: str) -> None:
        """Let no further request use it. Its number is not used again: the library may still have it. Raises
        InvalidRequest."""
        if self._paths.pop(name, None) is None:
            raise InvalidRequest(f"name: no adapter {name!r} is loaded")

    def request(self, name: str, library: Library) -> object:
        """Return what asks the library to use it. Raises InvalidRequest."""
        if name not in self._paths:
            raise InvalidRequest(
                f"lora_name: no adapter {name!r} is loaded; there are: {', '.join(self.names) or 'none'}"
            )
        number, path = self._paths[name]
        return library.lora_request(lora_name=name, lora_int_id=number, lora_path=str(path))
