"""The loads of `bench.gpu`, and the rates that every system is measured by."""

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from bench.gpu_models import LLAMA_8B, QWEN3_06B

PROMPT = TOKENS = 128
BATCHES = {LLAMA_8B: (1, 8, 64, 256), QWEN3_06B: (1, 8, 64, 256)}
LENGTHS = (2048, 8192)
REQUESTS = 256
MIXED = f"{REQUESTS} requests, 100-1024 in and out"
MIXED_MODEL = QWEN3_06B
ROUNDS = 3
TEMPERATURE = 0.6  # of nano-vllm's workload


class Load(NamedTuple):
    """One request: a prompt and how many tokens it gets."""

    prompt: tuple[int, ...]
    tokens: int


class System(Protocol):
    """A started system that answers requests."""

    def run(self, loads: Sequence[Load], temperature: float = 0.0) -> float:
        """Answer all requests at once; return the seconds it took."""


class Rates:
    """Tokens per second of one system, with random prompts of which no two share a prefix."""

    def __init__(self, system: System, vocab: int) -> None:
        self._system = system
        self._vocab = vocab
        self._random = random.Random(0)

    def loads(self, batch: int, prompt: int, tokens: int) -> list[Load]:
        """Return a batch of prompts of one length."""
        return [Load(self._prompt(prompt), tokens) for _ in range(batch)]

    def decode(self, batch: int, prompt: int, tokens: int) -> float:
        """Return tokens per second after the first ones: what a longer answer costs beyond one of a token."""
        return batch * (tokens - 1) / (self._timed(batch, prompt, tokens) - self._timed(batch, prompt, 1))

    def prefill(self, length: int, rounds: int = 5) -> float:
        """Return prompt tokens per second, of the median of some prompts."""
        times = sorted(self._timed(1, length, 1) for _ in range(rounds))
        return length / times[rounds // 2]

    def mixed(self) -> float:
        """Return generated tokens per second of nano-vllm's workload: 100 to 1,024 tokens in and out, at once."""
        numbers = random.Random(1)
        lengths = [(numbers.randint(100, 1024), numbers.randint(100, 1024)) for _ in range(REQUESTS)]
        loads = [Load(self._prompt(prompt), tokens) for prompt, tokens in lengths]
        return sum(load.tokens for load in loads) / self._system.run(loads, TEMPERATURE)

    def _prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(3, self._vocab) for _ in range(length))

    def _timed(self, batch: int, prompt: int, tokens: int) -> float:
        return self._system.run(self.loads(batch, prompt, tokens))
