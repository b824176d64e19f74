"""What the hand-off rules look at: a prefill with all that it tells. Blocks are copied here, in place of a transfer."""

import ctypes
from collections.abc import Iterable, Sequence

import msgspec

from baton.ports.engine import Stream, Work
from baton.ports.transfer import KvMemory
from baton.protocol.handoff import Bootstrap, Consume, Handoff, Produce
from baton.protocol.ids import new_request_id
from baton.protocol.outputs import Finished, KvComputed, KvWanted, TokenDelta
from baton.testing.engine_session import Answer, Session

CONSUME = Consume(source=Bootstrap(host="contract", port=1, room=1))


class Produced:
    """What a producing stream has told. The content of each block is kept as it was when it was told."""

    def __init__(self, session: Session, work: Work) -> None:
        self.session = session
        self.work = work
        self.stream = session.engine.submit(work)
        self.answer = Answer()
        self.blocks: list[int] = []
        self.content: list[tuple[bytes, ...]] = []
        self.tellings = 0
        self.complete = False
        self.cached_tokens = 0

    async def read(self) -> bool:
        """Take the next outputs; return whether there were any."""
        outputs = await self.stream.read()
        self.answer.add(outputs)
        for output in outputs:
            if isinstance(output, KvComputed):
                assert not self.complete, "nothing is told after the last"
                assert output.blocks or output.complete
                self.tellings += 1
                self.blocks += output.blocks
                self.content += [read_block(memory_of(self.session), block) for block in output.blocks]
                self.complete, self.cached_tokens = output.complete, output.cached_tokens
            elif isinstance(output, Finished):
                assert self.complete, "everything is told before the end"
        return bool(outputs)

    async def whole(self) -> "Produced":
        """Read to the end."""
        while await self.read():
            pass
        size = self.session.info.block_size
        assert len(self.blocks) == -(-len(self.work.token_ids) // size), "every block of the prompt is told once"
        assert len(set(self.blocks)) == len(self.blocks)
        assert len(self.answer.tokens[0]) == 1
        return self

    def check_unchanged(self) -> None:
        """What was told is as it was then."""
        memory = memory_of(self.session)
        assert [read_block(memory, block) for block in self.blocks] == self.content, "told blocks do not change"

    async def let_go(self) -> None:
        """Free what was lent."""
        self.check_unchanged()
        await self.session.engine.abort(self.work.request_id)


def memory_of(session: Session) -> KvMemory:
    """Return the KV memory of an engine that tells of it."""
    assert session.info.kv is not None
    return session.info.kv


def anew(work: Work, handoff: Handoff | None = None) -> Work:
    """Return the same work as another request."""
    return msgspec.structs.replace(work, request_id=new_request_id("contract"), handoff=handoff)


def producing(work: Work) -> Work:
    """Return what a prefill does for `work`."""
    sampling = msgspec.structs.replace(work.sampling, n=1)
    return msgspec.structs.replace(anew(work, Produce()), max_tokens=1, sampling=sampling)


async def wanted_by(stream: Stream) -> KvWanted:
    """Return where the KV is to go, which is the first thing that a consuming stream yields."""
    (wanted,) = await stream.read()
    assert isinstance(wanted, KvWanted)
    return wanted


async def scores_of(stream: Stream) -> list[float]:
    """Return the log-probabilities of an answer."""
    scores: list[float] = []
    while outputs := await stream.read():
        for output in outputs:
            if isinstance(output, TokenDelta) and output.logprobs is not None:
                scores += output.logprobs.chosen
    return scores


def read_block(memory: KvMemory, block: int) -> tuple[bytes, ...]:
    """Return what is in `block`, plane by plane."""
    return tuple(ctypes.string_at(address, memory.block_bytes) for address in _addresses(memory, block))


def write_block(memory: KvMemory, block: int, content: Sequence[bytes]) -> None:
    """Put what `read_block` returned, maybe from elsewhere, into `block`."""
    for address, part in zip(_addresses(memory, block), content, strict=True):
        assert len(part) == memory.block_bytes, "the blocks of two caches of one shape have one size"
        ctypes.memmove(address, part, len(part))


def _addresses(memory: KvMemory, block: int) -> Iterable[int]:
    assert 0 <= block < memory.blocks, "a block that is told of is a block of the cache"
    first = memory.address + block * memory.block_bytes
    return range(first, first + memory.nbytes, memory.plane_bytes)
