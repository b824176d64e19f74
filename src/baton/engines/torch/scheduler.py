"""What the next step computes: continuous batching, chunked prefill, priorities, preemption. Pure and synchronous.

Every step, sequences that decode get one token each; what is left of the token budget goes to prompts, oldest first.
When blocks run out the sequence that ranks last gives its own up, goes back to the queue and is computed again later.
The queue is strict: nobody overtakes its head, so nobody starves but by priority.
"""

import bisect
import sys
from typing import NamedTuple

from baton.engines.torch.blocks import BlockPool
from baton.engines.torch.sequence import Phase, Sequence

_NEVER = sys.maxsize


class Chunk(NamedTuple):
    """Tokens [start, start + length) of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    length: int

    @property
    def last(self) -> bool:
        """Whether the sequence has a next token after this chunk."""
        return self.start + self.length == len(self.sequence.tokens)


class Batch(NamedTuple):
    """One step: prompts in chunks, and sequences that feed their newest token."""

    prefills: list[Chunk]
    decodes: list[Chunk]


class Scheduler:
    """Holds every sequence between its submission and its end. `waiting` and `running` are in order of rank."""

    def __init__(self, pool: BlockPool, max_running: int, batch_tokens: int, reuse: bool = True) -> None:
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._max_running = max_running
        self._batch_tokens = max(batch_tokens, max_running)
        self._reuse = reuse

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in the queue."""
        sequence.phase = Phase.WAITING
        bisect.insort(self.waiting, sequence, key=_rank)

    def end(self, sequence: Sequence) -> None:
        """Take a sequence out, in any phase, and free its blocks. Idempotent."""
        if sequence.phase is Phase.RUNNING:
            self._leave(sequence)
        elif sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        sequence.phase = Phase.ENDED

    def retract(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue without its blocks."""
        self._leave(sequence)
        sequence.computed = sequence.committed = 0
        self.add(sequence)

    def schedule(self) -> Batch:
        """Choose the next step, with blocks for all of it."""
        chosen: dict[Sequence, Chunk] = {}
        budget = self._batch_tokens
        for decoding in (True, False):
            for sequence in tuple(self.running):
                if budget and sequence.phase is Phase.RUNNING and (sequence.pending == 1) is decoding:
                    budget -= self._choose(sequence, budget, chosen)
        while budget and self.waiting and self._admit(head := self.waiting[0], chosen):
            budget -= self._choose(head, budget, chosen)
        decodes = [chunk for chunk in chosen.values() if chunk.length == 1 and chunk.last]
        prefills = [chunk for chunk in chosen.values() if not (chunk.length == 1 and chunk.last)]
        return Batch(prefills, decodes)

    def computed(self, chunk: Chunk) -> None:
        """The KV of `chunk` is in the cache: blocks it filled can be reused from now on."""
        sequence, size = chunk.sequence, self.pool.size
        sequence.computed = chunk.start + chunk.length
        full = sequence.computed // size
        if self._reuse and full > sequence.committed:
            names = sequence.hashes_of_full_blocks(size)[:full]
            salt = sequence.work.cache_salt
            self.pool.commit(sequence.blocks, sequence.committed, names, sequence.tokens, salt)
            sequence.committed = full

    def clear(self) -> None:
        """Forget what could be reused. Sequences that run go on, and leave nothing behind for others."""
        self.pool.clear()
        for sequence in self.running:
            sequence.committed = _NEVER

    def _choose(self, sequence: Sequence, budget: int, chosen: dict[Sequence, Chunk]) -> int:
        """Give `sequence` its part of the step; return how many tokens that is, 0 if it had to give way.

        A prompt has had its blocks since it was admitted, so only sequences that decode can find that none is left,
        and those that rank after them have not been chosen yet.
        """
        length = min(sequence.pending, budget)
        while len(sequence.blocks) * self.pool.size < sequence.computed + length:
            if self.pool.free:
                sequence.blocks.append(self.pool.take())
                continue
            victim = self.running[-1]
            self.retract(victim)
            if victim is sequence:
                return 0
        chosen[sequence] = Chunk(sequence, sequence.computed, length)
        return length

    def _admit(self, sequence: Sequence, chosen: dict[Sequence, Chunk]) -> bool:
        """Let the head of the queue run, if it may; one of lower priority makes room for it."""
        pool = self.pool
        total = -(-len(sequence.tokens) // pool.size)
        while True:
            found = self._reusable(sequence)
            needed = total - len(found) + pool.idle(found)
            # One block in reserve for each that runs: who comes in should not be sent back at once.
            if len(self.running) < self._max_running and needed + len(self.running) <= pool.free:
                break
            victim = self.running[-1] if self.running else None
            if victim is None or victim.work.priority >= sequence.work.priority:
                return False
            chosen.pop(victim, None)
            self.retract(victim)
        del self.waiting[0]
        pool.hold(found)
        sequence.blocks = found + [pool.take() for _ in range(total - len(found))]
        sequence.computed = len(found) * pool.size
        sequence.committed = len(found)
        if not sequence.generated:
            sequence.cached_tokens = sequence.computed
        sequence.phase = Phase.RUNNING
        bisect.insort(self.running, sequence, key=_rank)
        return True

    def _reusable(self, sequence: Sequence) -> list[int]:
        """Return the blocks that need not be computed; the last token always is, to have something to go on from."""
        if not self._reuse or (sequence.plan.prompt_logprobs is not None and not sequence.generated):
            return []
        full = (len(sequence.tokens) - 1) // self.pool.size
        return self.pool.find(sequence.hashes_of_full_blocks(self.pool.size)[:full])

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank
