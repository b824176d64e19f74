"""What doubles share: the number of GPUs, the duration of a step, injected faults, and KV that can be claimed."""

import secrets
import threading
import time


class OfferedKv:
    """The KV of one prompt: the state of the model after it."""

    def __init__(self, state: int, prompt_tokens: int, first: int, free_at: float) -> None:
        self.state = state
        self.prompt_tokens = prompt_tokens
        self.first = first
        self.free_at = free_at


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
        self.windows: tuple[int, ...] = ()  # of layers with narrower attention windows
        self.poll_errors = 0  # this many calls for statistics or events fail
        self.fail_prompts: dict[int, str] = {}  # first token of a prompt -> "request", "die", "garbage", "timeout"
        self.cancelled = 0
        self.aborted_early = 0  # requests that were aborted while their KV was in transfer
        self.blocks_leaked = 0
        self.encode_gate = threading.Event()  # encoders wait for it
        self.encode_gate.set()
        self.unhealthy = False  # health checks of encoders fail
        self.encodes_aborted = False  # encoders ignore aborts
        self.preprocess_gate = threading.Event()  # preprocessing waits for it
        self.preprocess_gate.set()
        self.expands_tokens = False  # preprocessing does not tokenise the text of a prompt again
        self.prepared = 0  # preprocessed prompts whose media are in shared memory
        self.preprocessed: list[str] = []  # the kinds of prompts that were preprocessed
        self.processor_broken = False
        self._shared: dict[str, _Shared] = {}
        self._offered: dict[bytes, OfferedKv] = {}
        self._lock = threading.Lock()

    def share(self, content: bytes) -> str:
        """Share the embeddings of an image; return their name."""
        name = secrets.token_hex(8)
        with self._lock:
            self._shared[name] = _Shared(content)
        return name

    def read(self, name: str) -> bytes:
        """Return the content of `name`. Raises RuntimeError if it has been freed."""
        with self._lock:
            shared = self._shared.get(name)
            if shared is None or shared.dropped:
                raise RuntimeError("the memory of this handle has been freed")
            shared.read = True
            return shared.content

    def drop(self, names: list[str]) -> None:
        """The result that held them has been deleted."""
        with self._lock:
            for name in names:
                self._shared[name].dropped = True

    @property
    def media_shared(self) -> int:
        """How many shared tensors use memory: those that are held, and those that have never been read."""
        with self._lock:
            return sum(not (shared.dropped and shared.read) for shared in self._shared.values())

    @property
    def media_held(self) -> int:
        """How many shared tensors belong to a result that exists."""
        with self._lock:
            return sum(not shared.dropped for shared in self._shared.values())

    def offer_kv(self, key: bytes, state: int, prompt_tokens: int, first: int, keep_s: float) -> None:
        """Keep the KV of a prompt under `key`."""
        with self._lock:
            self._offered[key] = OfferedKv(state, prompt_tokens, first, time.monotonic() + keep_s)

    def claim_kv(self, key: bytes | None) -> OfferedKv | None:
        """Return the KV of `key`, once; None if there is none."""
        with self._lock:
            return self._offered.pop(key or b"", None)

    def is_offered(self, key: bytes) -> bool:
        """Whether it has neither been claimed nor expired."""
        with self._lock:
            kv = self._offered.get(key)
            if kv is not None and kv.free_at < time.monotonic():
                del self._offered[key]
                kv = None
            return kv is not None
