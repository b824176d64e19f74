"""One choice of one request inside the engine: its tokens, its blocks, and how far it is computed. Knows no torch."""

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING

from baton.engine_kit.block_hash import block_hash, media_in, root_hash
from baton.engines.torch.diffusion.canvas import Canvas
from baton.engines.torch.prompt_media import PromptMedia, RotaryPositions
from baton.ports.engine import Work
from baton.protocol.handoff import Consume, Produce
from baton.protocol.outputs import KvComputed, KvWanted, Logprobs

if TYPE_CHECKING:
    from baton.engines.torch.diffusion.options import DecodingPlan
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

    A sequence of a diffusion language model has a `canvas`, the block that is being decoded. It is computed in every
    step, and its KV is not final before the next block begins:

        tokens    [ prompt ....... | generated ... ]
        computed  [ KV of whole blocks ... )
        canvas                             [ block )           ends after the last token
    """

    __slots__ = (
        "arrival",
        "blocks",
        "cached_tokens",
        "canvas",
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
        "sampled_by_host",
        "sampling_state",
        "stepped",
        "tokens",
        "work",
    )

    def __init__(
        self,
        work: Work,
        index: int,
        params: "SamplingParams",
        arrival: int,
        media: PromptMedia | None = None,
        plan: "DecodingPlan | None" = None,
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
        self.canvas = Canvas(plan, self.tokens) if plan is not None else None
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
        self.sampled_by_host = False  # set where a device cannot sample alone
        self.stepped = False  # whether a step has computed some of it

    @property
    def rank(self) -> tuple[int, int, int]:
        """The order of service, smallest first: by higher priority, then by earlier arrival."""
        return (-self.work.priority, self.arrival, self.index)

    @property
    def generated(self) -> int:
        """How many tokens have been generated."""
        return len(self.tokens) - self.prompt_length

    @property
    def unit(self) -> int:
        """The sequence is computed in multiples of so many tokens: those of a block see each other."""
        return 1 if self.canvas is None else self.canvas.plan.block_length

    @property
    def end(self) -> int:
        """The position up to which a step can compute, including a block that is being decoded."""
        return len(self.tokens) if self.canvas is None else self.canvas.end

    @property
    def settled(self) -> int:
        """The position up to which KV is final once it is computed."""
        return len(self.tokens) if self.canvas is None else self.canvas.start

    @property
    def reusable(self) -> int:
        """The position up to which cached KV can be used: what gives the next logits is always computed."""
        return len(self.tokens) - 1 if self.canvas is None else self.canvas.start

    @property
    def pending(self) -> int:
        """How many positions have no final KV yet."""
        return self.end - self.computed

    @property
    def decode_rows(self) -> int:
        """The most rows of a step that decodes: a token, or a block that is decoded after a finished one."""
        return 1 if self.canvas is None else 2 * self.unit

    @property
    def decoding(self) -> bool:
        """Whether the next step can compute all that is left."""
        return self.pending <= self.decode_rows

    @property
    def has_prompt(self) -> bool:
        """Whether the KV of the prompt is computed, as far as choices can share it."""
        return self.computed >= self.prompt_length // self.unit * self.unit

    @property
    def event_salt(self) -> str | None:
        """What separates KV events of blocks with equal tokens."""
        salt, variant = self.work.cache_salt, self._variant
        return f"{variant}:{salt or ''}" if variant else salt

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

    @property
    def _variant(self) -> str:
        return "" if self.canvas is None else self.canvas.plan.variant

    def inputs(self, start: int, stop: int) -> list[int]:
        """Return the tokens of the rows [start, stop), masks included."""
        if self.canvas is None or stop <= self.canvas.start:
            return self.tokens[start:stop]
        return self.tokens[start : self.canvas.start] + self.canvas.inputs(self.tokens)

    def sampled_rows(self, start: int, length: int) -> list[int]:
        """Return which of `length` rows from `start` on, up to the end, give the logits of tokens."""
        return [length - 1] if self.canvas is None else [position - start for position in self.canvas.masked]

    def hashes_of_full_blocks(self, size: int) -> list[bytes]:
        """Return the hashes of all full blocks of the tokens so far; known ones are not computed again."""
        while self._add_hash(size):
            pass
        return self.hashes

    def each_hash(self, size: int) -> Iterator[bytes]:
        """Yield the same hashes; each is computed when it is asked for."""
        number = 0
        while number < len(self.hashes) or self._add_hash(size):
            yield self.hashes[number]
            number += 1

    def _add_hash(self, size: int) -> bool:
        """Compute the hash of the next block; return whether there is a full one."""
        hashes = self.hashes
        start = len(hashes) * size
        stop = start + size
        if stop > len(self.tokens):
            return False
        parent = hashes[-1] if hashes else root_hash(self.work.cache_salt, self._variant)
        media = media_in(self.media.spans, start, stop) if self.media is not None else ()
        hashes.append(block_hash(parent, self.tokens[start:stop], media))
        return True

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
