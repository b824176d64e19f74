"""Scheduler and blocks under every interleaving that hypothesis can think of: a cache of numbers stands in for KV."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.block_hash import block_hashes
from baton.engines.torch.blocks import BlockPool
from baton.engines.torch.plan import SamplingDefaults, make_plan
from baton.engines.torch.scheduler import Batch, Chunk, Scheduler
from baton.engines.torch.sequence import Phase, Sequence
from baton.ports.engine import Work
from baton.protocol.events import KvCleared, KvRemoved, KvStored
from baton.protocol.ids import RequestId
from baton.protocol.requests import OutputOptions

SIZE = 4


def make_sequence(
    prompt: tuple[int, ...],
    arrival: int = 0,
    priority: int = 0,
    salt: str | None = None,
    score_prompt: bool = False,
) -> Sequence:
    work = Work(
        request_id=RequestId(f"r{arrival}"),
        token_ids=prompt,
        max_tokens=32,
        priority=priority,
        cache_salt=salt,
        output=OutputOptions(prompt_logprobs=0 if score_prompt else None),
    )
    return Sequence(work, 0, make_plan(work, 0, SamplingDefaults(), 100), arrival)


def run(scheduler: Scheduler, batch: Batch, next_token: int = 7) -> list[Sequence]:
    """Pretend to compute `batch`; return the sequences that got a token."""
    grown = []
    for chunk in (*batch.prefills, *batch.decodes):
        last = chunk.last
        scheduler.computed(chunk)
        if last:
            chunk.sequence.tokens.append(next_token)
            grown.append(chunk.sequence)
    return grown


def make_scheduler(blocks: int = 8, max_running: int = 4, batch_tokens: int = 16, reuse: bool = True) -> Scheduler:
    return Scheduler(BlockPool(blocks, SIZE), max_running, batch_tokens, reuse)


def test_a_long_prompt_is_cut_into_chunks_and_decodes_go_on_beside_it() -> None:
    scheduler = make_scheduler(blocks=32, batch_tokens=8)
    short, long = make_sequence((1, 2, 3), 0), make_sequence(tuple(range(20)), 1)
    scheduler.add(short)
    scheduler.add(long)
    first = scheduler.schedule()
    assert [(chunk.sequence, chunk.start, chunk.length) for chunk in first.prefills] == [(short, 0, 3), (long, 0, 5)]
    run(scheduler, first)
    second = scheduler.schedule()
    assert [chunk.sequence for chunk in second.decodes] == [short]
    assert [(chunk.sequence, chunk.start, chunk.length) for chunk in second.prefills] == [(long, 5, 7)]


def test_a_prompt_seen_before_is_not_computed_again_but_for_its_last_token() -> None:
    scheduler = make_scheduler()
    first = make_sequence(tuple(range(8)), 0)
    scheduler.add(first)
    run(scheduler, scheduler.schedule())
    scheduler.end(first)
    second = make_sequence(tuple(range(8)), 1)
    scheduler.add(second)
    assert scheduler.schedule().prefills == [Chunk(second, 4, 4)]
    assert second.cached_tokens == 4


def test_a_salt_keeps_tenants_apart() -> None:
    scheduler = make_scheduler()
    for arrival, salt in enumerate(("a", "b", "a")):
        sequence = make_sequence(tuple(range(9)), arrival, salt=salt)
        scheduler.add(sequence)
        run(scheduler, scheduler.schedule())
        scheduler.end(sequence)
    assert sequence.cached_tokens == 8
    assert block_hashes(range(8), SIZE, "a") != block_hashes(range(8), SIZE, "b")


def test_a_prompt_that_must_be_scored_is_computed_whole() -> None:
    scheduler = make_scheduler()
    for arrival in range(2):
        sequence = make_sequence(tuple(range(9)), arrival, score_prompt=True)
        scheduler.add(sequence)
        assert scheduler.schedule().prefills == [Chunk(sequence, 0, 9)]
        scheduler.computed(Chunk(sequence, 0, 9))
        scheduler.end(sequence)


def test_without_reuse_nothing_is_found_and_nothing_is_told() -> None:
    scheduler = make_scheduler(reuse=False)
    for arrival in range(2):
        sequence = make_sequence(tuple(range(8)), arrival)
        scheduler.add(sequence)
        run(scheduler, scheduler.schedule())
        scheduler.end(sequence)
        assert sequence.cached_tokens == 0
    assert scheduler.pool.events == []


def test_when_blocks_run_out_the_last_to_come_gives_way_and_comes_back() -> None:
    scheduler = make_scheduler(blocks=4)
    early, late = make_sequence((1,) * 6, 0), make_sequence((2,) * 3, 1)
    scheduler.add(early)
    scheduler.add(late)
    run(scheduler, scheduler.schedule())
    while late.phase is Phase.RUNNING:
        run(scheduler, scheduler.schedule())
    assert early.phase is Phase.RUNNING
    assert late.blocks == []
    made = late.generated
    scheduler.end(early)
    run(scheduler, scheduler.schedule())
    assert late.phase is Phase.RUNNING
    assert late.generated == made + 1


def test_a_higher_priority_overtakes_and_displaces() -> None:
    scheduler = make_scheduler(blocks=8, max_running=1)
    low, next_low, high = (make_sequence((n,) * 6, n, priority=p) for n, p in ((1, 0), (2, 0), (3, 5)))
    scheduler.add(low)
    run(scheduler, scheduler.schedule())
    scheduler.add(next_low)
    scheduler.add(high)
    run(scheduler, scheduler.schedule())
    assert (high.phase, low.phase, next_low.phase) == (Phase.RUNNING, Phase.WAITING, Phase.WAITING)
    assert scheduler.waiting == [low, next_low]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    scheduler = make_scheduler(blocks=6)
    running, big, small = (make_sequence((n,) * size, n) for n, size in ((1, 9), (2, 16), (3, 2)))
    scheduler.add(running)
    run(scheduler, scheduler.schedule())
    scheduler.add(big)
    scheduler.add(small)
    run(scheduler, scheduler.schedule())
    assert scheduler.waiting == [big, small]


def test_equal_prompts_computed_together_end_up_in_the_same_blocks() -> None:
    scheduler = make_scheduler(blocks=8, batch_tokens=32)
    twins = [make_sequence(tuple(range(9)), arrival) for arrival in range(2)]
    for twin in twins:
        scheduler.add(twin)
    run(scheduler, scheduler.schedule())
    assert twins[0].blocks[:2] == twins[1].blocks[:2]
    assert twins[0].blocks[2] != twins[1].blocks[2]
    assert scheduler.pool.used == 4


def test_the_end_of_a_prompt_is_evicted_before_its_beginning() -> None:
    scheduler = make_scheduler(blocks=4)
    first = make_sequence(tuple(range(12)), 0)
    scheduler.add(first)
    run(scheduler, scheduler.schedule())
    scheduler.end(first)
    names = list(first.hashes)
    scheduler.pool.take(), scheduler.pool.take()
    assert scheduler.pool.events[1:] == [KvRemoved((names[2],))]
    assert len(scheduler.pool.find(names)) == 2


def test_a_prompt_takes_its_blocks_when_it_is_admitted() -> None:
    scheduler = make_scheduler(blocks=8, batch_tokens=4)
    long, other = make_sequence((1,) * 20, 0), make_sequence((2,) * 12, 1)
    scheduler.add(long)
    scheduler.add(other)
    run(scheduler, scheduler.schedule())
    assert scheduler.pool.used == 5
    for _ in range(4):
        assert scheduler.waiting == [other], "what is promised to the one cannot be given to the other"
        run(scheduler, scheduler.schedule())


def test_blocks_kept_for_reuse_count_as_room_only_once() -> None:
    scheduler = make_scheduler(blocks=4)
    first = make_sequence((1,) * 9, 0)
    scheduler.add(first)
    run(scheduler, scheduler.schedule())
    scheduler.end(first)
    scheduler.pool.take(), scheduler.pool.take()
    second = make_sequence((1,) * 9, 1)
    scheduler.add(second)
    assert scheduler.schedule() == Batch([], [])
    assert second.phase is Phase.WAITING


def test_after_a_clear_running_sequences_go_on_and_name_nothing() -> None:
    scheduler = make_scheduler(blocks=16)
    sequence = make_sequence(tuple(range(9)), 0)
    scheduler.add(sequence)
    run(scheduler, scheduler.schedule())
    scheduler.clear()
    for _ in range(8):
        run(scheduler, scheduler.schedule())
    kinds = [type(event) for event in scheduler.pool.events]
    assert kinds == [KvStored, KvCleared]


class Interleavings(RuleBasedStateMachine):
    """Submit, step, abort, retract, clear in any order, on a cache so small that everything collides."""

    @initialize(blocks=st.integers(9, 14), max_running=st.integers(1, 4), batch_tokens=st.integers(1, 12))
    def begin(self, blocks: int, max_running: int, batch_tokens: int) -> None:
        self.scheduler = make_scheduler(blocks, max_running, batch_tokens)
        self.pool = self.scheduler.pool
        self.max_running = max_running
        self.budget = max(batch_tokens, max_running)
        self.open: list[Sequence] = []
        self.limits: dict[Sequence, int] = {}
        self.cache: dict[tuple[int, int], tuple[int, ...]] = {}
        self.known: set[int] = set()
        self.arrivals = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "tenant"]),
        limit=st.integers(1, 12),
    )
    def submit(self, prompt: list[int], priority: int, salt: str | None, limit: int) -> None:
        sequence = make_sequence(tuple(prompt), self.arrivals, priority, salt)
        self.arrivals += 1
        self.limits[sequence] = limit
        self.open.append(sequence)
        self.scheduler.add(sequence)

    @precondition(lambda self: self.open)
    @rule(token=st.integers(0, 1))
    def step(self, token: int) -> None:
        batch = self.scheduler.schedule()
        chunks = [*batch.prefills, *batch.decodes]
        assert chunks, "there is work, so something is computed"
        assert sum(chunk.length for chunk in chunks) <= self.budget
        assert len({chunk.sequence for chunk in chunks}) == len(chunks)
        assert all(chunk.length == 1 and chunk.last for chunk in batch.decodes)
        for chunk in chunks:
            self.write(chunk)
        for chunk in chunks:
            self.read(chunk)
        for sequence in run(self.scheduler, batch, token):
            if sequence.generated >= self.limits[sequence]:
                self.finish(sequence)

    def write(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        for position in range(chunk.start, chunk.start + chunk.length):
            block = sequence.blocks[position // SIZE]
            assert self.pool.holders(block) == 1, "a block that is written has one holder"
            assert self.pool.name(block) is None, "and can be found by nobody"
            self.cache[block, position % SIZE] = (hash(sequence.work.cache_salt), *sequence.tokens[: position + 1])

    def read(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        for position in range(chunk.start + chunk.length):
            found = self.cache[sequence.blocks[position // SIZE], position % SIZE]
            assert found == (hash(sequence.work.cache_salt), *sequence.tokens[: position + 1])

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        sequence = self.open[which % len(self.open)]
        self.finish(sequence)
        self.scheduler.end(sequence)

    @precondition(lambda self: self.scheduler.running)
    @rule(which=st.integers(0, 100))
    def retract(self, which: int) -> None:
        self.scheduler.retract(self.scheduler.running[which % len(self.scheduler.running)])

    @rule()
    def clear(self) -> None:
        self.scheduler.clear()

    def finish(self, sequence: Sequence) -> None:
        self.open.remove(sequence)
        self.scheduler.end(sequence)
        assert sequence.blocks == []

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        held = [block for sequence in self.open for block in sequence.blocks]
        for block in range(self.pool.total):
            assert self.pool.holders(block) == held.count(block)
        assert self.pool.used == len(set(held))
        for sequence in self.open:
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            assert (sequence.phase is Phase.RUNNING) == (sequence in self.scheduler.running)
            assert (sequence.phase is Phase.WAITING) == (sequence in self.scheduler.waiting)
        assert len(self.scheduler.running) <= self.max_running
        assert self.scheduler.running == sorted(self.scheduler.running, key=lambda sequence: sequence.rank)

    @invariant()
    def events_tell_what_the_pool_holds(self) -> None:
        for event in self.pool.events:
            match event:
                case KvStored():
                    assert event.parent_hash is None or event.parent_hash in self.known
                    assert self.known.isdisjoint(event.block_hashes)
                    assert len(event.token_ids) == SIZE * len(event.block_hashes)
                    self.known.update(event.block_hashes)
                case KvRemoved():
                    assert self.known.issuperset(event.block_hashes)
                    self.known.difference_update(event.block_hashes)
                case KvCleared():
                    self.known.clear()
        self.pool.events = []
        names = {self.pool.name(block) for block in range(self.pool.total)} - {None}
        assert names == self.known

    def teardown(self) -> None:
        if hasattr(self, "open"):
            for sequence in tuple(self.open):
                self.finish(sequence)
            assert self.pool.used == 0


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
