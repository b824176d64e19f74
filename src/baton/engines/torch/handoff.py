"""What is told of blocks that others read or write: which are final, and which are to be filled. Pure."""

from baton.engines.torch.sequence import Sequence
from baton.protocol.outputs import KvComputed, KvWanted


def newly_final(sequence: Sequence, size: int) -> KvComputed | None:
    """Return the blocks that have become final since the last call, if any: from now on they do not change.

    A full block has its number for good once it has been committed; the last one is final with the whole prompt, for
    nothing is written after that.
    """
    complete = sequence.computed >= sequence.prompt_length
    final = len(sequence.blocks) if complete else sequence.computed // size
    blocks = tuple(sequence.blocks[sequence.told : final])
    if not blocks:
        return None
    sequence.told = final
    return KvComputed(blocks, complete, sequence.cached_tokens)


def to_be_filled(sequence: Sequence, size: int) -> KvWanted:
    """Return where the KV goes that a receiving sequence has not."""
    first = sequence.computed // size
    return KvWanted(first, tuple(sequence.blocks[first:]))
