"""What doubles share: how many GPUs there are, how fast time goes, what goes wrong, and KV that waits to be taken."""

import secrets
import threading
import time


class LentKv:
    """The KV of one prompt, with what it takes to go on: the state of the model after it."""

    def __init__(self, state: int, prompt_tokens: int, first: int, free_at: float) -> None:
        self.state = state
        self.prompt_tokens = prompt_tokens
        self.first = first
        self.free_at = free_at
        self.taken = False


class _Shared:
    """A tensor that other processes may read."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.read = False
        self.dropped = False


class World:
    """Set its fields before or while engines run; they are read at every step."""

    def __init__(self, gpus: int = 1, step_s: float = 0.001, prefill_steps: int = 3, transfer_steps: int = 5) -> None:
        self.gpus = gpus
        self.step_s = step_s
        self.prefill_steps = prefill_steps
        self.transfer_steps = transfer_steps
        self.blocks = 1024
        self.windows: tuple[int, ...] = ()  # of layers that look back less far than the others
        self.poll_errors = 0  # so many calls for stats or events fail
        self.fail_prompts: dict[int, str] = {}  # first token of a prompt -> "request", "die", "garbage", "timeout"
        self.cancelled = 0
        self.aborted_early = 0  # requests that were aborted while their KV was on its way
        self.blocks_leaked = 0
        self.encode_gate = threading.Event()  # encoders wait for it
        self.encode_gate.set()
        self.unhealthy = False  # health checks of encoders fail
        self.encodes_aborted = False  # an abort comes too late for an encoder
        self._shared: dict[str, _Shared] = {}
        self._lent: dict[bytes, LentKv] = {}
        self._lock = threading.Lock()

    def share(self, content: bytes) -> str:
        """Keep what an encoder made of `content`; return its name."""
        name = secrets.token_hex(8)
        with self._lock:
            self._shared[name] = _Shared(content)
        return name

    def opened(self, name: str) -> bytes:
        """Return what `name` stands for, to one more reader. Raises RuntimeError if it is gone."""
        with self._lock:
            shared = self._shared.get(name)
            if shared is None or shared.dropped:
                raise RuntimeError("the memory of this handle is gone")
            shared.read = True
            return shared.content

    def dropped(self, names: list[str]) -> None:
        """Nobody holds the result any more."""
        with self._lock:
            for name in names:
                self._shared[name].dropped = True

    @property
    def media_shared(self) -> int:
        """How many shared tensors take up memory: those that are held, and those that nobody has ever read."""
        with self._lock:
            return sum(not (shared.dropped and shared.read) for shared in self._shared.values())

    @property
    def media_held(self) -> int:
        """How many shared tensors belong to a result that somebody holds."""
        with self._lock:
            return sum(not shared.dropped for shared in self._shared.values())

    def lend(self, state: int, prompt_tokens: int, first: int, keep_s: float) -> bytes:
        """Keep the KV of a prompt; return what opens it."""
        key = secrets.token_bytes(24)
        with self._lock:
            self._lent[key] = LentKv(state, prompt_tokens, first, time.monotonic() + keep_s)
        return key

    def take(self, key: bytes | None) -> LentKv | None:
        """Return what `key` opens, once; None if there is nothing."""
        with self._lock:
            lent = self._lent.pop(key or b"", None)
        if lent is not None:
            lent.taken = True
        return lent

    def is_lent(self, key: bytes) -> bool:
        """Whether it has neither been taken nor been kept too long."""
        with self._lock:
            lent = self._lent.get(key)
            if lent is not None and lent.free_at < time.monotonic():
                del self._lent[key]
                lent = None
            return lent is not None
