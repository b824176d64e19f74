"""One choice of one request inside the engine: its tokens, its blocks, how far it has been computed."""

import enum
from typing import TYPE_CHECKING

from baton.engine_kit.block_hash import block_hash, root_hash
from baton.ports.engine import Work
from baton.protocol.handoff import Consume, Produce
from baton.protocol.outputs import Logprobs

if TYPE_CHECKING:
    from baton.engines.torch.sampling_params import Guide, SamplingPlan


class Phase(enum.Enum):
    """Where a sequence is. WAITING and RUNNING alternate when it is preempted."""

    HELD = "held"  # waits for its grammar, or for the first choice of its request
    WAITING = "waiting"
    RECEIVING = "receiving"  # others write the KV of its prompt into its blocks
    RUNNING = "running"
    LENT = "lent"  # computed no further; others read or write its blocks until it is aborted
    ENDED = "ended"


class Sequence:
    """One choice.

        tokens    [ prompt .............. | generated ...... ]
        computed  [ KV is in the cache ....... )               never past the last token: that one is fed next
        blocks    [ 0 ][ 1 ][ 2 ]...                           cover at least `computed` tokens
        hashes    [ 0 ][ 1 ]                                   names of full blocks, as far as they are known
        told      [ 0 ][ 1 ]                                   so many blocks may be read by others: they do not change

    A preempted sequence keeps its tokens and computes them again. One that others read from is never preempted.
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
        "phase",
        "plan",
        "produces",
        "prompt_length",
        "prompt_logprobs",
        "sampling_state",
        "tokens",
        "told",
        "work",
    )

    def __init__(self, work: Work, index: int, plan: "SamplingPlan", arrival: int) -> None:
        self.work = work
        self.index = index
        self.plan = plan
        self.guide: Guide | None = None
        self.group: list[Sequence] = [self]
        self.arrival = arrival
        self.phase = Phase.HELD
        self.tokens = list(work.token_ids)
        self.prompt_length = len(self.tokens)
        self.blocks: list[int] = []
        self.hashes: list[int] = []
        self.computed = 0
        self.committed = 0
        self.cached_tokens = self.prompt_length  # until it is admitted, when it is known how much of it is here
        self.told = 0
        self.produces = isinstance(work.handoff, Produce)
        # The later choices find the prompt of the first; a prompt that is scored has to be computed.
        self.consumes = isinstance(work.handoff, Consume) and index == 0 and plan.prompt_logprobs is None
        self.prompt_logprobs: list[Logprobs] = []
        self.sampling_state: object = None

    @property
    def rank(self) -> tuple[int, int, int]:
        """The order of service: smaller goes first. A higher priority wins, then who came earlier."""
        return (-self.work.priority, self.arrival, self.index)

    @property
    def generated(self) -> int:
        """How many tokens have been made."""
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """How many tokens have no KV yet. One means that the sequence decodes."""
        return len(self.tokens) - self.computed

    @property
    def scored(self) -> bool:
        """Whether every token of the prompt is still to be scored; later choices share what the first one found."""
        return self.plan.prompt_logprobs is not None and not self.index and not self.generated

    def hashes_of_full_blocks(self, size: int) -> list[int]:
        """Return the names of all full blocks of the tokens so far; known ones are not computed again."""
        hashes = self.hashes
        parent = hashes[-1] if hashes else root_hash(self.work.cache_salt)
        for start in range(len(hashes) * size, len(self.tokens) - size + 1, size):
            parent = block_hash(parent, self.tokens[start : start + size])
            hashes.append(parent)
        return hashes
