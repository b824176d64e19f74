"""Names of KV blocks: no prompt and no cache salt leads to the blocks of another prompt."""

from array import array

from baton.engine_kit.block_hash import block_hash, block_hashes, event_hash, root_hash
from baton.engines.echo.blocks import BLOCK, BlockPool
from baton.engines.torch.blocks import BlockPool as TorchBlockPool

PROMPT = list(range(1, 2 * BLOCK + 1))


def salt_that_reads_as(token_ids: list[int]) -> str:
    """Return a salt whose bytes are those of a block of tokens."""
    return array("I", token_ids).tobytes().decode()


def test_a_salt_cannot_stand_for_a_block() -> None:
    forged = salt_that_reads_as(PROMPT[:BLOCK])
    assert root_hash(forged) != block_hash(b"", PROMPT[:BLOCK])
    assert not set(block_hashes(PROMPT[BLOCK:], BLOCK, forged)) & set(block_hashes(PROMPT, BLOCK))


def test_a_tenant_with_a_forged_salt_finds_nothing_of_others() -> None:
    pool = BlockPool(100)
    assert pool.allocate(PROMPT, len(PROMPT) + 1, None) is not None
    found = pool.allocate(PROMPT[BLOCK:], BLOCK + 1, salt_that_reads_as(PROMPT[:BLOCK]))
    assert found is not None
    assert found.cached == 0


def test_names_are_too_long_to_collide_and_blocks_with_equal_event_hashes_are_not_shared() -> None:
    name = block_hashes(PROMPT, BLOCK)[0]
    assert len(name) == 32
    other = name[:8] + bytes(24)
    assert event_hash(other) == event_hash(name)
    pool = TorchBlockPool(4, BLOCK)
    blocks = [pool.allocate()]
    pool.commit(blocks, 0, [name], PROMPT[:BLOCK])
    assert pool.find([name]) == blocks
    assert pool.find([other]) == []


def test_event_hashes_are_signed_64_bit_numbers_and_equal_in_every_process() -> None:
    assert event_hash(bytes([255]) * 32) == -1
    assert [event_hash(name) for name in block_hashes(PROMPT, BLOCK)] == [7012086019182586416, 1612496489981164787]
