"""A world in a directory, for doubles in different processes: shared tensors and KV are files in it, faults too."""

import json
import secrets
import time
from pathlib import Path

from tests.doubles.trtllm.world import OfferedKv, World


class FileWorld(World):
    """Doubles in other processes see the same one. A test creates a file with the name of a fault."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    @property
    def processor_broken(self) -> bool:
        """Whether image processors fail: the file `processor_broken` exists."""
        return (self._directory / "processor_broken").exists()

    @processor_broken.setter
    def processor_broken(self, broken: bool) -> None:
        assert not broken, "create the file"

    def share(self, content: bytes) -> str:
        """See `World.share`."""
        name = secrets.token_hex(8)
        self._file(name, "tensor").write_bytes(content)
        return name

    def read(self, name: str) -> bytes:
        """See `World.read`."""
        try:
            content = self._file(name, "tensor").read_bytes()
        except FileNotFoundError:
            raise RuntimeError("the memory of this handle has been freed") from None
        self._mark(name, "read")
        return content

    def drop(self, names: list[str]) -> None:
        """See `World.drop`."""
        for name in names:
            self._mark(name, "dropped")

    @property
    def media_shared(self) -> int:
        """See `World.media_shared`."""
        return len(list(self._directory.glob("*.tensor")))

    def offer_kv(self, key: bytes, state: int, prompt_tokens: int, first: int, keep_s: float) -> None:
        """See `World.offer_kv`."""
        offered = {"state": state, "prompt_tokens": prompt_tokens, "first": first, "free_at": time.time() + keep_s}
        self._file(key.hex(), "kv").write_text(json.dumps(offered))

    def claim_kv(self, key: bytes | None) -> OfferedKv | None:
        """See `World.claim_kv`."""
        try:
            content = self._file((key or b"").hex(), "kv").rename(self._file((key or b"").hex(), "claimed")).read_text()
        except FileNotFoundError:
            return None
        return OfferedKv(**json.loads(content))

    def is_offered(self, key: bytes) -> bool:
        """See `World.is_offered`."""
        return self._file(key.hex(), "kv").exists()

    def _file(self, name: str, kind: str) -> Path:
        return self._directory / f"{name}.{kind}"

    def _mark(self, name: str, mark: str) -> None:
        """A tensor uses memory until it has been dropped and read."""
        self._file(name, mark).touch()
        if self._file(name, "dropped").exists() and self._file(name, "read").exists():
            self._file(name, "tensor").unlink(missing_ok=True)
