"""The block accounting of the echo engine: no block is lost or counted twice, in any order of requests."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from baton.engine_kit.block_hash import block_hashes, event_hash
from baton.engines.echo.blocks import BLOCK, BlockPool, HeldBlocks

TOTAL = 12


def tokens_of(blocks: list[int], rest: int = 0) -> list[int]:
    """A prompt of blocks that repeat one number each, with `rest` tokens after the last full one."""
    return [number for number in blocks for _ in range(BLOCK)] + [99] * rest


PROMPTS = st.builds(tokens_of, st.lists(st.integers(0, 2), max_size=5), st.integers(0, BLOCK - 1)).filter(bool)


class Interleavings(RuleBasedStateMachine):
    """Requests allocate and release, in any order, on a small pool."""

    allocations = Bundle("allocations")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.inside = 0
        self.parents: dict[bytes, bytes | None] = {}
        self.reusable: set[bytes] = set()

    @rule(target=allocations, prompt=PROMPTS, answer=st.integers(1, 3 * BLOCK), salt=st.sampled_from([None, "mine"]))
    def allocate(self, prompt: list[int], answer: int, salt: str | None) -> HeldBlocks | None:
        before = self.pool.used
        blocks = -(-(len(prompt) + answer) // BLOCK)
        held = self.pool.allocate(prompt, len(prompt) + answer, salt)
        if held is None:
            assert blocks > self.pool.total - before
            assert self.pool.used == before
            return None
        self.inside += 1
        assert len(set(held.numbers)) == blocks
        assert held.hashes == block_hashes(prompt, BLOCK, salt)
        assert before <= self.pool.used <= before + blocks
        self.forget_evicted()
        assert set(held.hashes[: held.cached]) <= self.reusable
        assert self.reusable.isdisjoint(held.hashes[held.cached :]), "blocks that are not cached are new"
        for parent, name in zip([None, *held.hashes], held.hashes, strict=False):
            self.parents[name] = parent
        self.reusable |= set(held.hashes)
        return held

    @rule(held=consumes(allocations))
    def release(self, held: HeldBlocks | None) -> None:
        if held is not None:
            before = self.pool.used
            self.pool.release(held)
            self.inside -= 1
            assert self.pool.used <= before
            self.forget_evicted()

    def forget_evicted(self) -> None:
        evicted, self.pool.evicted = self.pool.evicted, []
        for name in evicted:
            assert name in self.reusable
            self.reusable.discard(name)
        orphans = [name for name in self.reusable if self.parents[name] in evicted]
        assert orphans == [], "a block is evicted only after those that continue it"

    @invariant()
    def used_and_free_add_up(self) -> None:
        assert 0 <= self.pool.used <= TOTAL
        assert self.pool.used + self.pool.free == TOTAL

    @invariant()
    def without_requests_no_block_is_used(self) -> None:
        if not self.inside:
            assert self.pool.used == 0


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=50, stateful_step_count=30)


def test_a_cached_prefix_is_reused() -> None:
    pool = BlockPool(TOTAL)
    first = pool.allocate(tokens_of([1, 2], 3), 40, None)
    assert first is not None
    assert (first.cached, len(first.hashes), pool.used) == (0, 2, 3)
    second = pool.allocate(tokens_of([1, 2, 3]), 50, None)
    assert second is not None
    assert (second.cached, second.hashes[:2]) == (2, first.hashes)
    assert pool.used == 3 + 2
    pool.release(first)
    pool.release(second)
    third = pool.allocate(tokens_of([1, 2, 4]), 50, None)
    assert third is not None
    assert third.cached == 2


def test_a_salt_separates_prefixes() -> None:
    assert set(block_hashes(tokens_of([1, 2]), BLOCK, "a")).isdisjoint(block_hashes(tokens_of([1, 2]), BLOCK, "b"))
    assert block_hashes(tokens_of([1, 2]), BLOCK) == block_hashes(tokens_of([1, 2], 5), BLOCK)


def test_cached_blocks_are_evicted_for_requests() -> None:
    pool = BlockPool(4)
    held = pool.allocate(tokens_of([1, 2, 0]), 4 * BLOCK, None)
    assert held is not None
    pool.release(held)
    assert (pool.used, pool.evicted) == (0, [])
    other = pool.allocate(tokens_of([5]), 2 * BLOCK, None)
    assert other is not None
    assert pool.evicted == [held.hashes[2]]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=5 * BLOCK))
def test_hashes_cover_full_blocks_and_everything_before_them(token_ids: list[int]) -> None:
    hashes = block_hashes(token_ids, BLOCK)
    assert len(hashes) == len(token_ids) // BLOCK
    assert all(-(2**63) <= event_hash(name) < 2**63 for name in hashes)
    if hashes:
        changed = [token_ids[0] ^ 1, *token_ids[1:]]
        assert set(hashes).isdisjoint(block_hashes(changed, BLOCK))
