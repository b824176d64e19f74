"""The accounting of blocks: nothing is lost, nothing is counted twice, whatever comes and goes."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from baton.engine_kit.block_hash import block_hashes
from baton.engines.echo.blocks import BLOCK, BlockLedger, Hold

TOTAL = 12


def tokens_of(blocks: list[int], rest: int = 0) -> list[int]:
    """A prompt whose blocks are told apart by a number, with some tokens after the last full one."""
    return [number for number in blocks for _ in range(BLOCK)] + [99] * rest


PROMPTS = st.builds(tokens_of, st.lists(st.integers(0, 2), max_size=5), st.integers(0, BLOCK - 1)).filter(bool)


class Storm(RuleBasedStateMachine):
    """Requests take and give back, in any order, on a small ledger."""

    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = BlockLedger(TOTAL)
        self.inside = 0
        self.parents: dict[int, int | None] = {}
        self.reusable: set[int] = set()

    @rule(target=holds, prompt=PROMPTS, answer=st.integers(1, 3 * BLOCK), salt=st.sampled_from([None, "mine"]))
    def take(self, prompt: list[int], answer: int, salt: str | None) -> Hold | None:
        before = self.ledger.used
        blocks = -(-(len(prompt) + answer) // BLOCK)
        hold = self.ledger.take(prompt, len(prompt) + answer, salt)
        if hold is None:
            assert blocks > self.ledger.total - before
            assert self.ledger.used == before
            return None
        self.inside += 1
        assert len(hold.named) + hold.own == blocks
        assert hold.named == block_hashes(prompt, BLOCK, salt)
        assert before <= self.ledger.used <= before + blocks
        self.forget_evicted()
        assert set(hold.named[: hold.cached]) <= self.reusable
        assert self.reusable.isdisjoint(hold.fresh), "what is stored was not stored already"
        for parent, name in zip([None, *hold.named], hold.named, strict=False):
            self.parents[name] = parent
        self.reusable |= set(hold.named)
        return hold

    @rule(hold=consumes(holds))
    def give_back(self, hold: Hold | None) -> None:
        if hold is not None:
            before = self.ledger.used
            self.ledger.give_back(hold)
            self.inside -= 1
            assert self.ledger.used <= before
            self.forget_evicted()

    def forget_evicted(self) -> None:
        evicted, self.ledger.evicted = self.ledger.evicted, []
        for name in evicted:
            assert name in self.reusable
            self.reusable.discard(name)
        orphans = [name for name in self.reusable if self.parents[name] in evicted]
        assert orphans == [], "a block leaves only after those that continue it"

    @invariant()
    def used_and_free_add_up(self) -> None:
        assert 0 <= self.ledger.used <= TOTAL
        assert self.ledger.used + self.ledger.free == TOTAL

    @invariant()
    def nobody_inside_means_nothing_used(self) -> None:
        if not self.inside:
            assert self.ledger.used == 0


TestStorm = Storm.TestCase
TestStorm.settings = settings(max_examples=100, stateful_step_count=30)


def test_a_prefix_that_was_used_before_is_reused() -> None:
    ledger = BlockLedger(TOTAL)
    first = ledger.take(tokens_of([1, 2], 3), 40, None)
    assert first is not None
    assert (first.cached, len(first.fresh), ledger.used) == (0, 2, 3)
    second = ledger.take(tokens_of([1, 2, 3]), 50, None)
    assert second is not None
    assert (second.cached, second.fresh) == (2, second.named[2:])
    assert ledger.used == 3 + 2
    ledger.give_back(first)
    ledger.give_back(second)
    third = ledger.take(tokens_of([1, 2, 4]), 50, None)
    assert third is not None
    assert third.cached == 2


def test_a_salt_keeps_prefixes_apart() -> None:
    assert set(block_hashes(tokens_of([1, 2]), BLOCK, "a")).isdisjoint(block_hashes(tokens_of([1, 2]), BLOCK, "b"))
    assert block_hashes(tokens_of([1, 2]), BLOCK) == block_hashes(tokens_of([1, 2], 5), BLOCK)


def test_kept_blocks_make_room_for_requests_and_are_told() -> None:
    ledger = BlockLedger(4)
    hold = ledger.take(tokens_of([1, 2, 0]), 4 * BLOCK, None)
    assert hold is not None
    ledger.give_back(hold)
    assert (ledger.used, ledger.evicted) == (0, [])
    other = ledger.take(tokens_of([5]), 2 * BLOCK, None)
    assert other is not None
    assert ledger.evicted == [hold.named[2]]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=5 * BLOCK))
def test_hashes_name_full_blocks_and_depend_on_all_before_them(token_ids: list[int]) -> None:
    hashes = block_hashes(token_ids, BLOCK)
    assert len(hashes) == len(token_ids) // BLOCK
    assert all(-(2**63) <= name < 2**63 for name in hashes)
    if hashes:
        changed = [token_ids[0] ^ 1, *token_ids[1:]]
        assert set(hashes).isdisjoint(block_hashes(changed, BLOCK))
