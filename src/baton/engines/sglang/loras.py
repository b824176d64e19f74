"""LoRA adapters of a running SGLang."""

import asyncio
from pathlib import Path

from baton.engines.sglang.sglang_types import Manager
from baton.errors import InvalidRequest
from baton.protocol.commands import ListLoras, LoadLora, Outcome, UnloadLora


class Loras:
    """Loads and unloads adapters by name."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    async def execute(self, command: LoadLora | UnloadLora | ListLoras) -> Outcome:
        """See `Engine.execute`."""
        match command:
            case LoadLora():
                await self._load(command.name, Path(command.path))
                message = f"loaded {command.name}"
            case UnloadLora():
                await self._unload(command.name)
                message = f"unloaded {command.name}"
            case ListLoras():
                message = "loaded adapters"
        return Outcome(message=message, adapters=self._loaded())

    async def _load(self, name: str, path: Path) -> None:
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        if name in self._loaded():
            raise InvalidRequest(f"name: {name!r} is in use; unload it first")
        directory = await asyncio.to_thread(_directory, path)
        request = LoadLoRAAdapterReqInput(lora_name=name, lora_path=directory)
        answer = await self._manager.load_lora_adapter(request, None)
        if not answer.success:
            raise InvalidRequest(f"path: {answer.error_message}")

    async def _unload(self, name: str) -> None:
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        if name not in self._loaded():
            raise InvalidRequest(f"name: {name!r} is not loaded")
        answer = await self._manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name), None)
        if not answer.success:
            raise InvalidRequest(f"name: {answer.error_message}")
        # SGLang remembers the path, and would load it again for the next request that names it.
        self._manager.lora_ref_cache.pop(name, None)

    def _loaded(self) -> tuple[str, ...]:
        return tuple(sorted(self._manager.lora_registry.get_all_adapters()))


def _directory(path: Path) -> str:
    """Return a local directory. SGLang would look for any other name on a hub."""
    found = path.expanduser()
    if not found.is_dir():
        raise InvalidRequest(f"path: {path} is not a directory")
    return str(found)
