"""One choice of one request inside the engine: its tokens, its blocks, and how far it is computed. Knows no torch."""

import enum
from typing import TYPE_CHECKING

from baton.engine_kit.block_hash import block_hash, media_in, root_hash
from baton.engines.torch.prompt_media import PromptMedia, RotaryPositions
from baton.ports.engine import Work
from baton.protocol.handoff import Consume, Produce
from baton.protocol.outputs import KvComputed, KvWanted, Logprobs

if TYPE_CHECKING:
    from baton.engines.torch.sampling_params import Guide, SamplingParams


class Phase(enum.Enum):
    """The state of a sequence. WAITING and RUNNING alternate when it is preempted."""

    HELD = "held"  # waits for its grammar, or for the first choice of its request
    WAITING = "waiting"
    RECEIVING = "receiving"  # the KV of its prompt is being written into its blocks by a transfer
    RUNNING = "running"
    OFFERED = "offered"  # computed no further; a transfer may read or write its blocks until it is aborted
    ENDED = "ended"


class Sequence:
    """One choice.

        tokens    [ prompt .............. | generated ...... ]
        computed  [ KV is in the cache ....... )               never past the last token: that one is fed next
        blocks    [ 0 ][ 1 ][ 2 ]...                           cover at least `computed` tokens
        hashes    [ 0 ][ 1 ]                                   hashes of full blocks, as far as they are computed
        offered   [ 0 ][ 1 ]                                   number of blocks that peers may read: they are final

    A preempted sequence keeps its tokens and computes them again. One with offered blocks is never preempted.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "cached_tokens",
        "committed",
        "computed",
        "consumes",
        "group",
        "guide",
        "hashes",
        "index",
        "media",
        "offered",
        "params",
        "phase",
        "produces",
        "prompt_length",
        "prompt_logprobs",
        "sampling_state",
        "tokens",
        "work",
    )

    def __init__(
        self, work: Work, index: int, params: "SamplingParams", arrival: int, media: PromptMedia | None = None
    ) -> None:
        self.work = work
        self.index = index
        self.params = params
        self.guide: Guide | None = None
        self.group: list[Sequence] = [self]
        self.arrival = arrival
        self.media = media
        self.phase = Phase.HELD
        self.tokens = list(work.token_ids)
        self.prompt_length = len(self.tokens)
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []
        self.computed = 0
        self.committed = 0
        self.cached_tokens = self.prompt_length  # lowered when it is admitted and the cache is searched
        self.offered = 0
        self.produces = isinstance(work.handoff, Produce)
        # Later choices reuse the prompt of the first; a prompt with log-probabilities has to be computed.
        self.consumes = isinstance(work.handoff, Consume) and index == 0 and params.prompt_logprobs is None
        self.prompt_logprobs: list[Logprobs] = []
        self.sampling_state: object = None

    @property
    def rank(self) -> tuple[int, int, int]:
        """The order of service, smallest first: by higher priority, then by earlier arrival."""
        return (-self.work.priority, self.arrival, self.index)

    @property
    def generated(self) -> int:
        """How many tokens have been generated."""
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """How many tokens have no KV yet. One means that the sequence decodes."""
        return len(self.tokens) - self.computed

    @property
    def scored(self) -> bool:
        """Whether the prompt still needs log-probabilities; later choices share those of the first."""
        return self.params.prompt_logprobs is not None and not self.index and not self.generated

    def lacks_rows(self, computed: int) -> bool:
        """Whether the tokens from `computed` on cannot be computed, because rows of media among them are not here."""
        return self.media is not None and computed < self.media.rows_end and not self.media.has_rows

    def positions(self, start: int, stop: int) -> RotaryPositions:
        """Return the rotary positions of tokens [start, stop)."""
        return 0 if self.media is None else self.media.positions(start, stop)

    def hashes_of_full_blocks(self, size: int) -> list[bytes]:
        """Return the hashes of all full blocks of the tokens so far; known ones are not computed again."""
        hashes = self.hashes
        parent = hashes[-1] if hashes else root_hash(self.work.cache_salt)
        spans = self.media.spans if self.media is not None else ()
        for start in range(len(hashes) * size, len(self.tokens) - size + 1, size):
            parent = block_hash(parent, self.tokens[start : start + size], media_in(spans, start, start + size))
            hashes.append(parent)
        return hashes

    def take_computed_blocks(self, size: int) -> KvComputed | None:
        """Return the blocks that have become final since the last call, if any: from now on they do not change.

        A full block keeps its number once it has been committed; the last one is final with the whole prompt, because
        nothing is written after that.
        """
        complete = self.computed >= self.prompt_length
        final = len(self.blocks) if complete else self.computed // size
        blocks = tuple(self.blocks[self.offered : final])
        if not blocks:
            return None
        self.offered = final
        return KvComputed(blocks, complete, self.cached_tokens)

    def wanted_blocks(self, size: int) -> KvWanted:
        """Return the blocks of a receiving sequence whose KV is missing."""
        first = self.computed // size
        return KvWanted(first, tuple(self.blocks[first:]))
