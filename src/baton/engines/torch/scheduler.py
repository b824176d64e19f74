"""Chooses what the next step computes: continuous batching, chunked prefill, priorities, preemption. Pure.

In every step each decoding sequence computes one token, or its block in a diffusion language model. The rest of the
token budget goes to prompts, mostly to the shortest first. When KV blocks run out, the sequence that ranks last is
preempted: it frees its blocks, returns to the queue and is computed again later. The queue is strict: no sequence
overtakes its head, so only priority can starve one.

    add ──► WAITING ───────────────────► RUNNING ──► end
              │ ▲                         │ ▲ │
              │ └──────── retract ────────┘ │ └──► OFFERED    not computed further; its blocks stay until `end`
              └──► RECEIVING ── received ───┘                 a transfer writes the KV of its prompt into its blocks

A sequence that fails while a transfer uses its blocks is OFFERED, too. One whose prompt has media without their rows
continues from KV of another worker; if it has lost that KV by a preemption, it is `lost`.
"""

import bisect
import itertools
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
        return self.start + self.length == self.sequence.end

    @property
    def samples(self) -> bool:
        """Whether the sequence runs and gets its next token with this chunk."""
        return self.sequence.phase is Phase.RUNNING and self.last

    @property
    def decodes(self) -> bool:
        """Whether it is the newest token of a sequence, and text; or the block that is decoded."""
        sequence, media = self.sequence, self.sequence.media
        return self.length <= sequence.decode_rows and self.last and (media is None or self.start >= media.rows_end)


class Batch(NamedTuple):
    """One step: prompts in chunks, and sequences that feed their newest token or the block that is decoded."""

    prefills: list[Chunk]
    decodes: list[Chunk]


class Scheduler:
    """Every sequence between its submission and its end. `waiting` and `running` are in order of rank.

    `wanting` gathers those that have begun to receive, and `lost` those that can no longer be computed, until the
    caller takes the lists. `blocked` means that no step is possible before a sequence is added or changes its state.
    `batch_tokens` is the most that a step computes, of models that decode token by token.
    """

    def __init__(
        self, pool: BlockPool, max_running: int, batch_tokens: int, reuse: bool = True, by_block: bool = False
    ) -> None:
        """Prepare. `by_block` is for diffusion language models, whose sequences compute a block in every step."""
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.receiving: set[Sequence] = set()
        self.offered: set[Sequence] = set()
        self.wanting: list[Sequence] = []
        self.lost: list[Sequence] = []
        self.blocked = False
        self._max_running = max_running
        self.batch_tokens = max(batch_tokens, max_running)
        # Blocks that are decoded may fill a step; prompts still go on, by at least one block.
        self._least_prompt_tokens = max(batch_tokens // 4, pool.size) if by_block else 0
        self._reuse = reuse

    @property
    def in_handoff(self) -> int:
        """How many sequences have blocks that a transfer may read or write."""
        return len(self.offered) + len(self.receiving) + sum(sequence.offered > 0 for sequence in self.running)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in the queue."""
        sequence.phase = Phase.WAITING
        self.blocked = False
        bisect.insort(self.waiting, sequence, key=_rank)

    def received(self, sequence: Sequence) -> None:
        """Continue: the KV of the prompt is in its blocks. Does nothing if the sequence is not receiving."""
        if sequence.phase is Phase.RECEIVING:
            self._leave(sequence)
            self._run(sequence)
            self.computed(Chunk(sequence, sequence.computed, sequence.prompt_length - 1 - sequence.computed))

    def offer(self, sequence: Sequence) -> None:
        """Stop computing a sequence that runs or receives, and leave its blocks as they are until its end."""
        self._leave(sequence)
        sequence.phase = Phase.OFFERED
        self.offered.add(sequence)

    def end(self, sequence: Sequence) -> None:
        """Take a sequence out, in any phase, and free its blocks. Idempotent."""
        self._leave(sequence)
        self._free(sequence)
        sequence.phase = Phase.ENDED

    def retract(self, sequence: Sequence) -> None:
        """Return a running sequence without offered blocks to the queue, and free its blocks."""
        self._leave(sequence)
        self._free(sequence)
        sequence.computed = sequence.committed = 0
        self.add(sequence)

    def retract_all(self) -> list[Sequence]:
        """Retract every running sequence without offered blocks; return them."""
        sequences = [sequence for sequence in self.running if not sequence.offered]
        for sequence in sequences:
            self.retract(sequence)
        return sequences

    def schedule(self) -> Batch:
        """Choose the next step, with blocks for all of it; it may be empty."""
        chosen: dict[Sequence, Chunk] = {}
        budget = self._choose_decodes(chosen)
        if budget:
            for sequence, share in _shares(self._prompts(budget, chosen), budget).items():
                self._choose(sequence, share, chosen)
        self.blocked = not chosen
        batch = Batch([], [])
        for chunk in chosen.values():
            (batch.decodes if chunk.decodes else batch.prefills).append(chunk)
        batch.decodes.sort(key=lambda chunk: chunk.sequence.unit)  # blocks of one length are computed together
        return batch

    def next_decodes(self, batch: Batch) -> list[Chunk]:
        """Return the step after `batch` before its tokens are known, with blocks for all of it.

        It is empty if the tokens or what else is scheduled could change it, other than by ending sequences. Sequences
        that `batch` certainly ends are not in it. All sequences decode token by token.
        """
        every = [chunk.sequence for chunk in (*batch.prefills, *batch.decodes) if chunk.samples]
        if len(every) < len(self.running) or (self.waiting and self._fits(self.waiting[0])):
            return []
        going = [sequence for sequence in every if sequence.generated + 1 < sequence.params.max_tokens]
        return [Chunk(sequence, sequence.end, 1) for sequence in going] if self._extend_blocks(going) else []

    def _extend_blocks(self, sequences: list[Sequence]) -> bool:
        """Give each sequence a block for its next token; return False, having changed nothing, if blocks run out."""
        size = self.pool.size
        lacking = [sequence for sequence in sequences if len(sequence.blocks) * size <= sequence.end]
        if len(lacking) > self.pool.free:
            return False
        for sequence in lacking:
            sequence.blocks.append(self.pool.allocate())
        return True

    def computed(self, chunk: Chunk) -> None:
        """Record that the KV of `chunk` is in the cache. The blocks that it filled can be reused from now on."""
        sequence, size = chunk.sequence, self.pool.size
        sequence.computed = min(chunk.start + chunk.length, sequence.settled)
        full = sequence.computed // size
        if self._reuse and full > sequence.committed:
            hashes = sequence.hashes_of_full_blocks(size)[:full]
            media = sequence.media.routed if sequence.media is not None else ()
            before = sequence.blocks[sequence.committed : full]
            self.pool.commit(sequence.blocks, sequence.committed, hashes, sequence.tokens, sequence.event_salt, media)
            if sequence.blocks[sequence.committed : full] != before:
                sequence.blocks = list(sequence.blocks)  # another list: copies of it on a device are out of date
            sequence.committed = full

    def hash_blocks(self, batch: Batch) -> None:
        """Compute now the hashes that `computed` needs for the prompts of `batch`."""
        if self._reuse:
            for chunk in batch.prefills:
                chunk.sequence.hashes_of_full_blocks(self.pool.size)

    def clear(self) -> None:
        """Empty the prefix cache. Sequences that have blocks continue, and add nothing to the cache."""
        self.pool.clear()
        for sequence in (*self.running, *self.receiving):
            sequence.committed = _NEVER

    def _choose_decodes(self, chosen: dict[Sequence, Chunk]) -> int:
        """Give each decoding sequence its token or its block; return the token budget of prompts."""
        budget = self.batch_tokens
        for sequence in tuple(self.running):
            if sequence.phase is Phase.RUNNING and sequence.decoding:
                budget -= self._choose(sequence, sequence.pending, chosen)
        return max(budget, self._least_prompt_tokens)

    def _choose(self, sequence: Sequence, budget: int, chosen: dict[Sequence, Chunk]) -> int:
        """Give `sequence` its share of the step; return how many tokens that is, 0 if it was preempted.

        A prompt has all its blocks since it was admitted, so only a decoding sequence can run out of blocks, and those
        that rank after it have not been chosen yet. A decoding sequence has no offered blocks.
        """
        length = min(sequence.pending, budget)
        while len(sequence.blocks) * self.pool.size < sequence.computed + length:
            if self.pool.free:
                sequence.blocks.append(self.pool.allocate())
                continue
            victim = self._last() or sequence
            self.retract(victim)
            if victim is sequence:
                return 0
        chosen[sequence] = Chunk(sequence, sequence.computed, length)
        return length

    def _prompts(self, budget: int, chosen: dict[Sequence, Chunk]) -> list[Sequence]:
        """Return the prompts to compute, in order of rank; admit more while there are few."""
        while True:
            prompts = self._unchosen(chosen)
            enough = len(prompts) >= PROMPTS_AT_ONCE and sum(one.pending for one in prompts) >= budget
            if enough or not self.waiting or not self._admit(self.waiting[0], chosen):
                return self._unchosen(chosen)  # an admission that fails may have preempted some

    def _unchosen(self, chosen: dict[Sequence, Chunk]) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence not in chosen]

    def _admit(self, sequence: Sequence, chosen: dict[Sequence, Chunk]) -> bool:
        """Let the head of the queue run or receive if it fits; a sequence of lower priority is preempted for it."""
        pool = self.pool
        while (found := self._room(sequence)) is None:
            victim = self._last()
            if victim is None or victim.work.priority >= sequence.work.priority:
                return False
            chosen.pop(victim, None)
            self.retract(victim)
        total = -(-sequence.end // pool.size)
        del self.waiting[0]
        if not sequence.consumes and sequence.lacks_rows(len(found) * pool.size):
            sequence.phase = Phase.HELD
            self.lost.append(sequence)
            return True
        pool.hold(found)
        sequence.blocks = found + [pool.allocate() for _ in range(total - len(found))]
        sequence.computed = len(found) * pool.size
        sequence.committed = len(found)
        if not sequence.generated:  # after a preemption, the blocks that it finds are its own
            sequence.cached_tokens = min(sequence.cached_tokens, sequence.computed)
        self._begin(sequence)
        return True

    def _room(self, sequence: Sequence) -> list[int] | None:
        """Return the cached blocks of a sequence if it fits beside those that are present, else None."""
        found = self._reusable(sequence)
        needed = -(-sequence.end // self.pool.size) - len(found) + self.pool.idle(found)
        # One block in reserve for each running sequence, so that an admitted one is not preempted at once.
        present = len(self.running) + len(self.receiving)
        return found if present < self._max_running and needed + present <= self.pool.free else None

    def _fits(self, sequence: Sequence) -> bool:
        """Whether the head of the queue would be admitted, with a preemption if need be."""
        victim = self._last()
        preempts = victim is not None and victim.work.priority < sequence.work.priority
        return preempts or self._room(sequence) is not None

    def _begin(self, sequence: Sequence) -> None:
        """Receive the KV of a consumed prompt, once, as far as it is not cached here; otherwise compute it."""
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
        """Return the sequence to preempt: the last in rank without offered blocks."""
        return next((sequence for sequence in reversed(self.running) if not sequence.offered), None)

    def _reusable(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks of the sequence."""
        if not self._reuse or sequence.scored:
            return []
        full = sequence.reusable // self.pool.size
        return self.pool.find(itertools.islice(sequence.each_hash(self.pool.size), full))

    def _leave(self, sequence: Sequence) -> None:
        self.blocked = False
        match sequence.phase:
            case Phase.RUNNING:
                self.running.remove(sequence)
            case Phase.WAITING:
                self.waiting.remove(sequence)
            case Phase.RECEIVING:
                self.receiving.remove(sequence)
            case Phase.OFFERED:
                self.offered.remove(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []


def _shares(prompts: list[Sequence], budget: int) -> dict[Sequence, int]:
    """Divide a step among prompts: a quarter for the first in rank, so that it does not starve, the rest to the
    shortest first, so that a short prompt does not wait for a long one."""
    shares = dict.fromkeys(prompts, 0)
    first = [(prompt, max(prompt.unit, budget // 4)) for prompt in prompts[:1]]
    for prompt, limit in first + [(prompt, budget) for prompt in sorted(prompts, key=_urgency)]:
        share = min(prompt.pending - shares[prompt], limit, budget) // prompt.unit * prompt.unit
        shares[prompt] += share
        budget -= share
    return {prompt: share for prompt, share in shares.items() if share}


def _urgency(sequence: Sequence) -> tuple[int, int]:
    return (-sequence.work.priority, sequence.pending)


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank
