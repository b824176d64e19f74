"""What the next step computes: continuous batching, chunked prefill, priorities, preemption. Pure and synchronous.

Every step, sequences that decode get one token each; what is left of the token budget goes to prompts, mostly to the
shortest first.
When blocks run out the sequence that ranks last gives its own up, goes back to the queue and is computed again later.
The queue is strict: nobody overtakes its head, so nobody starves but by priority.

    add ──► WAITING ───────────────────► RUNNING ──► end
              │ ▲                         │ ▲ │
              │ └──────── retract ────────┘ │ └──► LENT    computes no more; others have its blocks until its end
              └──► RECEIVING ── received ───┘              others write the KV of its prompt into its blocks

A sequence that fails while others have its blocks is lent, too.
"""

import bisect
import sys
from typing import NamedTuple

from baton.engines.torch.blocks import BlockPool
from baton.engines.torch.sequence import Phase, Sequence

PROMPTS_AT_ONCE = 8

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
    """Holds every sequence between its submission and its end. `waiting` and `running` are in order of rank.

    `wanting` gathers those that have begun to receive, until somebody takes it. `blocked` says that there is no step to
    make before a sequence comes, or leaves the state it is in.
    """

    def __init__(self, pool: BlockPool, max_running: int, batch_tokens: int, reuse: bool = True) -> None:
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.receiving: set[Sequence] = set()
        self.lent: set[Sequence] = set()
        self.wanting: list[Sequence] = []
        self.blocked = False
        self._max_running = max_running
        self._batch_tokens = max(batch_tokens, max_running)
        self._reuse = reuse

    @property
    def handed_over(self) -> int:
        """How many sequences have blocks that others read or write."""
        return len(self.lent) + len(self.receiving) + sum(sequence.told > 0 for sequence in self.running)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in the queue."""
        sequence.phase = Phase.WAITING
        self.blocked = False
        bisect.insort(self.waiting, sequence, key=_rank)

    def received(self, sequence: Sequence) -> None:
        """The KV of the prompt is in its blocks: compute the last token and go on. Nothing, if it does not receive."""
        if sequence.phase is Phase.RECEIVING:
            self._leave(sequence)
            self._run(sequence)
            self.computed(Chunk(sequence, sequence.computed, sequence.prompt_length - 1 - sequence.computed))

    def lend(self, sequence: Sequence) -> None:
        """Compute no more of a sequence that runs or receives; nobody touches its blocks until its end."""
        self._leave(sequence)
        sequence.phase = Phase.LENT
        self.lent.add(sequence)

    def end(self, sequence: Sequence) -> None:
        """Take a sequence out, in any phase, and free its blocks. Idempotent."""
        self._leave(sequence)
        self._free(sequence)
        sequence.phase = Phase.ENDED

    def retract(self, sequence: Sequence) -> None:
        """Send a running sequence that nobody reads from back to the queue without its blocks."""
        self._leave(sequence)
        self._free(sequence)
        sequence.computed = sequence.committed = 0
        self.add(sequence)

    def retract_all(self) -> list[Sequence]:
        """Send back whom one can; return them."""
        sequences = [sequence for sequence in self.running if not sequence.told]
        for sequence in sequences:
            self.retract(sequence)
        return sequences

    def schedule(self) -> Batch:
        """Choose the next step, with blocks for all of it; it may be empty."""
        chosen: dict[Sequence, Chunk] = {}
        budget = self._batch_tokens
        for sequence in tuple(self.running):
            if budget and sequence.phase is Phase.RUNNING and sequence.pending == 1:
                budget -= self._choose(sequence, budget, chosen)
        if budget:
            for sequence, share in _shares(self._prompts(budget, chosen), budget).items():
                self._choose(sequence, share, chosen)
        self.blocked = not chosen
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
        """Forget what could be reused. Sequences that have blocks go on, and leave nothing behind for others."""
        self.pool.clear()
        for sequence in (*self.running, *self.receiving):
            sequence.committed = _NEVER

    def _choose(self, sequence: Sequence, budget: int, chosen: dict[Sequence, Chunk]) -> int:
        """Give `sequence` its part of the step; return how many tokens that is, 0 if it had to give way.

        A prompt has had its blocks since it was admitted, so only sequences that decode can find that none is left,
        and those that rank after them have not been chosen yet. Nobody reads from a sequence that decodes.
        """
        length = min(sequence.pending, budget)
        while len(sequence.blocks) * self.pool.size < sequence.computed + length:
            if self.pool.free:
                sequence.blocks.append(self.pool.take())
                continue
            victim = self._last() or sequence
            self.retract(victim)
            if victim is sequence:
                return 0
        chosen[sequence] = Chunk(sequence, sequence.computed, length)
        return length

    def _prompts(self, budget: int, chosen: dict[Sequence, Chunk]) -> list[Sequence]:
        """Return what there is to compute beside what decodes, in order of rank; let more in while that is little."""
        while True:
            prompts = [one for one in self.running if one.phase is Phase.RUNNING and one not in chosen]
            enough = len(prompts) >= PROMPTS_AT_ONCE and sum(one.pending for one in prompts) >= budget
            if enough or not self.waiting or not self._admit(self.waiting[0], chosen):
                return prompts

    def _admit(self, sequence: Sequence, chosen: dict[Sequence, Chunk]) -> bool:
        """Let the head of the queue run or receive, if it may; one of lower priority makes room for it."""
        pool = self.pool
        total = -(-len(sequence.tokens) // pool.size)
        while True:
            found = self._reusable(sequence)
            needed = total - len(found) + pool.idle(found)
            # One block in reserve for each that runs: who comes in should not be sent back at once.
            present = len(self.running) + len(self.receiving)
            if present < self._max_running and needed + present <= pool.free:
                break
            victim = self._last()
            if victim is None or victim.work.priority >= sequence.work.priority:
                return False
            chosen.pop(victim, None)
            self.retract(victim)
        del self.waiting[0]
        pool.hold(found)
        sequence.blocks = found + [pool.take() for _ in range(total - len(found))]
        sequence.computed = len(found) * pool.size
        sequence.committed = len(found)
        if not sequence.generated:  # what it finds of its own, when it comes back, was computed for it all the same
            sequence.cached_tokens = min(sequence.cached_tokens, sequence.computed)
        self._begin(sequence)
        return True

    def _begin(self, sequence: Sequence) -> None:
        """Receive, once, what is not here of a prompt whose KV is elsewhere; else compute it."""
        consumes, sequence.consumes = sequence.consumes, False
        if consumes and sequence.computed < sequence.prompt_length - 1:
            sequence.phase = Phase.RECEIVING
            self.receiving.add(sequence)
            self.wanting.append(sequence)
        else:
            self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        sequence.phase = Phase.RUNNING
        bisect.insort(self.running, sequence, key=_rank)

    def _last(self) -> Sequence | None:
        """Return who gives way: the last in rank of those that nobody reads from."""
        return next((sequence for sequence in reversed(self.running) if not sequence.told), None)

    def _reusable(self, sequence: Sequence) -> list[int]:
        """Return the blocks that need not be computed; the last token always is, to have something to go on from."""
        if not self._reuse or sequence.scored:
            return []
        full = (len(sequence.tokens) - 1) // self.pool.size
        return self.pool.find(sequence.hashes_of_full_blocks(self.pool.size)[:full])

    def _leave(self, sequence: Sequence) -> None:
        self.blocked = False
        match sequence.phase:
            case Phase.RUNNING:
                self.running.remove(sequence)
            case Phase.WAITING:
                self.waiting.remove(sequence)
            case Phase.RECEIVING:
                self.receiving.remove(sequence)
            case Phase.LENT:
                self.lent.remove(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []


def _shares(prompts: list[Sequence], budget: int) -> dict[Sequence, int]:
    """Divide a step among prompts: a quarter for the first in rank, so that nobody starves, the rest to the shortest
    first, so that a short prompt does not wait for a long one."""
    shares = dict.fromkeys(prompts, 0)
    for prompt, most in [(one, max(1, budget // 4)) for one in prompts[:1]] + [
        (one, budget) for one in sorted(prompts, key=_urgency)
    ]:
        share = min(prompt.pending - shares[prompt], most, budget)
        shares[prompt] += share
        budget -= share
    return {prompt: share for prompt, share in shares.items() if share}


def _urgency(sequence: Sequence) -> tuple[int, int]:
    return (-sequence.work.priority, sequence.pending)


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank
