"""The block of a sequence that is being decoded. Knows no torch."""

from typing import TYPE_CHECKING

from baton.engines.torch.diffusion.options import DecodingPlan
from baton.engines.torch.sampling_params import SamplingParams, finish_of

if TYPE_CHECKING:
    from baton.engines.torch.sampling.sampler import Sampled


class Canvas:
    """One block: after the tokens that are final, positions that are decided in any order.

        tokens   [ .................. | final ]              of the sequence
        block                [ start                    end )
        cells                         [ decided, None, ... ]  None is a mask

    A decided position never changes.
    """

    __slots__ = ("cells", "passes", "plan", "start")

    def __init__(self, plan: DecodingPlan, tokens: list[int]) -> None:
        self.plan = plan
        self.begin(tokens)

    def begin(self, tokens: list[int]) -> None:
        """Begin the block in which the next token after `tokens` is."""
        length = self.plan.block_length
        self.start = len(tokens) // length * length
        self.cells: list[Sampled | None] = [None] * (self.end - len(tokens))
        self.passes = 0

    @property
    def end(self) -> int:
        """The position after the block."""
        return self.start + self.plan.block_length

    @property
    def masked(self) -> list[int]:
        """The positions that are not decided, in order."""
        first = self.end - len(self.cells)
        return [first + number for number, cell in enumerate(self.cells) if cell is None]

    def inputs(self, tokens: list[int]) -> list[int]:
        """Return the tokens of the block to compute, with masks; `tokens` are those of the sequence."""
        mask = self.plan.mask_token
        return tokens[self.start :] + [mask if cell is None else cell.token for cell in self.cells]

    def select(self, confidences: list[float]) -> list[int]:
        """Return which of the masked positions this pass decides, by the confidences of their candidates."""
        return self.plan.select(confidences, self.plan.quota(len(self.cells), self.passes))

    def decide(self, decided: "dict[int, Sampled]") -> None:
        """Set the tokens of these positions: a pass has been computed."""
        first = self.end - len(self.cells)
        for position, sampled in decided.items():
            self.cells[position - first] = sampled
        self.passes += 1

    def complete(self, params: SamplingParams, generated: int) -> "list[Sampled] | None":
        """Return the new tokens in order if no mask is left, or none before the token that ends the choice; else None.

        `generated` is the number of tokens before the block. The last token may end the choice.
        """
        found: list[Sampled] = []
        for number, cell in enumerate(self.cells, generated + 1):
            if cell is None:
                return None
            found.append(cell)
            if finish_of(params, cell.token, number) is not None:
                break
        return found
