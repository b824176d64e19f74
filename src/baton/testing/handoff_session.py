"""A producing request with its offered blocks, for the handoff rules. Blocks are copied here, without a transfer."""

import ctypes
from collections.abc import Iterable, Sequence

import msgspec

from baton.engine_kit.cuda.driver import device_number, find_driver
from baton.ports.engine import Stream, Work
from baton.ports.transfer import BlockMemory
from baton.protocol.handoff import Bootstrap, Consume, Handoff, Produce
from baton.protocol.ids import new_request_id
from baton.protocol.outputs import Finished, KvComputed, KvWanted, TokenDelta
from baton.testing.engine_session import Answer, Session

CONSUME = Consume(source=Bootstrap(host="contract", port=1, room=1))


class Produced:
    """The outputs of a producing stream. The content of each block is saved when it is offered."""

    def __init__(self, session: Session, work: Work) -> None:
        self.session = session
        self.work = work
        self.stream = session.engine.submit(work)
        self.answer = Answer()
        self.blocks: list[int] = []
        self.content: list[tuple[bytes, ...]] = []
        self.offers = 0
        self.complete = False
        self.cached_tokens = 0

    async def read(self) -> bool:
        """Read the next outputs; return whether there were any."""
        outputs = await self.stream.read()
        self.answer.add(outputs)
        for output in outputs:
            if isinstance(output, KvComputed):
                assert not self.complete, "no block is offered after the last"
                assert output.blocks or output.complete
                self.offers += 1
                self.blocks += output.blocks
                self.content += [read_block(memory_of(self.session), block) for block in output.blocks]
                self.complete, self.cached_tokens = output.complete, output.cached_tokens
            elif isinstance(output, Finished):
                assert self.complete, "every block is offered before the end"
        return bool(outputs)

    async def read_all(self) -> "Produced":
        """Read to the end."""
        while await self.read():
            pass
        size = self.session.info.block_size
        assert len(self.blocks) == -(-len(self.work.token_ids) // size), "every block of the prompt is offered once"
        assert len(set(self.blocks)) == len(self.blocks)
        assert len(self.answer.tokens[0]) == 1
        return self

    def check_unchanged(self) -> None:
        """Check that offered blocks have the content that they were offered with."""
        memory = memory_of(self.session)
        assert [read_block(memory, block) for block in self.blocks] == self.content, "offered blocks do not change"

    async def release(self) -> None:
        """Free the offered blocks."""
        self.check_unchanged()
        await self.session.engine.abort(self.work.request_id)


def memory_of(session: Session) -> BlockMemory:
    """Return the KV memory of the engine."""
    assert session.info.kv is not None
    return session.info.kv


def as_new_request(work: Work, handoff: Handoff | None = None) -> Work:
    """Return the same work as another request."""
    return msgspec.structs.replace(work, request_id=new_request_id("contract"), handoff=handoff)


def producing(work: Work) -> Work:
    """Return the work that produces the KV for `work`."""
    sampling = msgspec.structs.replace(work.sampling, n=1)
    return msgspec.structs.replace(as_new_request(work, Produce()), max_tokens=1, sampling=sampling)


async def wanted_by(stream: Stream) -> KvWanted:
    """Return the wanted blocks, which a consuming stream yields first."""
    (wanted,) = await stream.read()
    assert isinstance(wanted, KvWanted)
    return wanted


async def scores_of(stream: Stream) -> list[float]:
    """Return the logprobs of a stream."""
    scores: list[float] = []
    while outputs := await stream.read():
        for output in outputs:
            if isinstance(output, TokenDelta) and output.logprobs is not None:
                scores += output.logprobs.chosen
    return scores


def read_block(memory: BlockMemory, block: int) -> tuple[bytes, ...]:
    """Return the content of `block`, plane by plane."""
    content = ctypes.create_string_buffer(memory.block_bytes)
    parts = []
    for address in _addresses(memory, block):
        _copy(memory, ctypes.addressof(content), address)
        parts.append(content.raw)
    return tuple(parts)


def write_block(memory: BlockMemory, block: int, content: Sequence[bytes]) -> None:
    """Write what `read_block` returned, perhaps for another cache, into `block`."""
    for address, part in zip(_addresses(memory, block), content, strict=True):
        assert len(part) == memory.block_bytes, "the blocks of two caches of one shape have one size"
        buffer = ctypes.create_string_buffer(part, len(part))
        _copy(memory, address, ctypes.addressof(buffer))


def _copy(memory: BlockMemory, to: int, source: int) -> None:
    """Copy a block of a plane between the host and the device of `memory`."""
    device = device_number(memory.device)
    if device is None:
        ctypes.memmove(to, source, memory.block_bytes)
        return
    driver = find_driver()
    assert driver is not None
    driver.use(device)
    driver.copy(to, source, memory.block_bytes, 0)
    driver.wait(0)


def _addresses(memory: BlockMemory, block: int) -> Iterable[int]:
    assert 0 <= block < memory.blocks, "a block is a block of the cache"
    first = memory.address + block * memory.block_bytes
    return range(first, first + memory.nbytes, memory.plane_bytes)
