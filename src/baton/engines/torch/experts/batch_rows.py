"""The rows of a step as records of experts have them."""

from itertools import chain

from baton.engines.torch.experts.recorder import PassRows
from baton.engines.torch.scheduler import Batch, Chunk

UNDECIDED = -1  # in place of a token that the step itself decides


def batch_rows(batch: Batch) -> PassRows:
    """Return the tokens and positions of a batch in the order of its rows: prompts, then decodes."""
    chunks = [*batch.prefills, *batch.decodes]
    return PassRows(
        tokens=list(chain.from_iterable(map(_tokens, chunks))),
        positions=list(chain.from_iterable(range(chunk.start, chunk.start + chunk.length) for chunk in chunks)),
        extend_lengths=[chunk.length for chunk in chunks],
        prompts=len(batch.prefills),
    )


def _tokens(chunk: Chunk) -> list[int]:
    known = chunk.sequence.tokens[chunk.start : chunk.start + chunk.length]
    return known + [UNDECIDED] * (chunk.length - len(known))
