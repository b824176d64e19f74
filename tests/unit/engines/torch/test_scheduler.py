"""Scheduler and block pool under random interleavings; a dictionary of numbers stands in for the KV cache."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine_kit.block_hash import block_hashes, event_hash
from baton.engines.torch.blocks import BlockPool
from baton.engines.torch.sampling_params import make_sampling_params
from baton.engines.torch.scheduler import PROMPTS_AT_ONCE, Batch, Chunk, Scheduler
from baton.engines.torch.sequence import Phase, Sequence
from baton.models.defaults import SamplingDefaults
from baton.ports.engine import Work
from baton.protocol.events import KvCleared, KvRemoved, KvStored
from baton.protocol.handoff import Bootstrap, Consume, Handoff, Produce
from baton.protocol.ids import RequestId
from baton.protocol.outputs import KvComputed, KvWanted
from baton.protocol.requests import OutputOptions

SIZE = 4
Content = tuple[tuple[int, ...], ...]

PRODUCE = Produce()
CONSUME = Consume(source=Bootstrap(host="elsewhere", port=1, room=1))


def make_sequence(
    prompt: tuple[int, ...],
    arrival: int = 0,
    priority: int = 0,
    salt: str | None = None,
    score_prompt: bool = False,
    handoff: Handoff | None = None,
) -> Sequence:
    work = Work(
        request_id=RequestId(f"r{arrival}"),
        token_ids=prompt,
        max_tokens=32,
        priority=priority,
        cache_salt=salt,
        output=OutputOptions(prompt_logprobs=0 if score_prompt else None),
        handoff=handoff,
    )
    return Sequence(work, 0, make_sampling_params(work, SamplingDefaults(), 100), arrival)


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


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
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


def lengths(scheduler: Scheduler, *sequences: Sequence) -> list[int]:
    """Make a step; return how many tokens of each sequence were in it."""
    batch = scheduler.schedule()
    run(scheduler, batch)
    chosen = {chunk.sequence: chunk.length for chunk in (*batch.prefills, *batch.decodes)}
    return [chosen.get(sequence, 0) for sequence in sequences]


def test_a_short_prompt_does_not_wait_for_a_long_one_which_still_progresses() -> None:
    scheduler = make_scheduler(blocks=64, batch_tokens=16)
    long = make_sequence(tuple(range(60)), 0)
    scheduler.add(long)
    assert lengths(scheduler, long) == [16]
    others = [make_sequence(tuple(range(100, 112)), number) for number in (1, 2)]
    for sequence in others:
        scheduler.add(sequence)
    assert lengths(scheduler, long, *others) == [4, 12, 0]
    assert lengths(scheduler, long, *others) == [3, 1, 12], "decodes come before all prompts"


def test_prompts_of_equal_length_are_computed_in_order_of_arrival() -> None:
    scheduler = make_scheduler(blocks=64, batch_tokens=16)
    first, second = (make_sequence(tuple(range(start, start + 24)), start) for start in (0, 100))
    scheduler.add(first)
    scheduler.add(second)
    assert lengths(scheduler, first, second) == [16, 0]
    assert lengths(scheduler, first, second) == [8, 8]


def test_a_prompt_preempted_for_one_that_still_does_not_fit_holds_no_blocks() -> None:
    scheduler = make_scheduler(blocks=8, batch_tokens=16)
    kept, preempted = make_sequence(tuple(range(12)), 0, priority=1), make_sequence(tuple(range(100, 112)), 1)
    scheduler.add(kept)
    scheduler.add(preempted)
    run(scheduler, scheduler.schedule())
    assert 0 < preempted.computed < 12
    scheduler.add(make_sequence(tuple(range(200, 224)), 2, priority=1))
    batch = scheduler.schedule()
    assert [chunk.sequence for chunk in (*batch.prefills, *batch.decodes)] == [kept]
    assert (preempted.phase, preempted.blocks) == (Phase.WAITING, [])
    assert scheduler.pool.used == len(kept.blocks)


def test_a_prompt_of_higher_priority_goes_before_shorter_ones() -> None:
    scheduler = make_scheduler(blocks=64, batch_tokens=16)
    short, urgent = make_sequence(tuple(range(20)), 0), make_sequence(tuple(range(100, 140)), 1, priority=1)
    scheduler.add(short)
    scheduler.add(urgent)
    assert lengths(scheduler, short, urgent) == [0, 16]


def test_only_a_few_prompts_are_started_at_a_time() -> None:
    scheduler = make_scheduler(blocks=1024, max_running=64, batch_tokens=64)
    prompts = [make_sequence(tuple(range(number * 50, number * 50 + 50)), number) for number in range(20)]
    for sequence in prompts:
        scheduler.add(sequence)
    scheduler.schedule()
    assert len(scheduler.running) == PROMPTS_AT_ONCE


def test_a_cached_prompt_is_reused_except_for_its_last_block() -> None:
    scheduler = make_scheduler()
    first = make_sequence(tuple(range(8)), 0)
    scheduler.add(first)
    run(scheduler, scheduler.schedule())
    scheduler.end(first)
    second = make_sequence(tuple(range(8)), 1)
    scheduler.add(second)
    assert scheduler.schedule().prefills == [Chunk(second, 4, 4)]
    assert second.cached_tokens == 4


def test_a_salt_separates_tenants() -> None:
    scheduler = make_scheduler()
    for arrival, salt in enumerate(("a", "b", "a")):
        sequence = make_sequence(tuple(range(9)), arrival, salt=salt)
        scheduler.add(sequence)
        run(scheduler, scheduler.schedule())
        scheduler.end(sequence)
    assert sequence.cached_tokens == 8
    assert block_hashes(range(8), SIZE, "a") != block_hashes(range(8), SIZE, "b")


def test_a_prompt_with_logprobs_is_computed_completely() -> None:
    scheduler = make_scheduler()
    for arrival in range(2):
        sequence = make_sequence(tuple(range(9)), arrival, score_prompt=True)
        scheduler.add(sequence)
        assert scheduler.schedule().prefills == [Chunk(sequence, 0, 9)]
        scheduler.computed(Chunk(sequence, 0, 9))
        scheduler.end(sequence)


def test_later_choices_reuse_a_prompt_with_logprobs() -> None:
    scheduler = make_scheduler()
    first = make_sequence(tuple(range(9)), score_prompt=True)
    second = Sequence(first.work, 1, first.params, 0)
    scheduler.add(first)
    run(scheduler, scheduler.schedule())
    scheduler.add(second)
    assert scheduler.schedule().prefills == []
    assert (second.computed, second.blocks[:2]) == (8, first.blocks[:2])


def test_blocks_that_a_preempted_prompt_computed_do_not_count_as_cached() -> None:
    scheduler = make_scheduler(max_running=1)
    earlier = make_sequence((*range(4), 50), 0)
    scheduler.add(earlier)
    run(scheduler, scheduler.schedule())
    scheduler.end(earlier)
    low, high = make_sequence(tuple(range(24)), 1), make_sequence((60,), 2, priority=5)
    scheduler.add(low)
    run(scheduler, scheduler.schedule())
    scheduler.add(high)
    run(scheduler, scheduler.schedule())
    assert low.phase is Phase.WAITING
    scheduler.end(high)
    scheduler.schedule()
    assert (low.computed, low.cached_tokens) == (20, 4)


def test_without_prefix_cache_nothing_is_reused_or_published() -> None:
    scheduler = make_scheduler(reuse=False)
    for arrival in range(2):
        sequence = make_sequence(tuple(range(8)), arrival)
        scheduler.add(sequence)
        run(scheduler, scheduler.schedule())
        scheduler.end(sequence)
        assert sequence.cached_tokens == 0
    assert scheduler.pool.events == []


def test_when_blocks_run_out_the_latest_sequence_is_preempted_and_continues_later() -> None:
    scheduler = make_scheduler(blocks=4)
    early, late = make_sequence((1,) * 6, 0), make_sequence((2,) * 3, 1)
    scheduler.add(early)
    scheduler.add(late)
    run(scheduler, scheduler.schedule())
    while late.phase is Phase.RUNNING:
        run(scheduler, scheduler.schedule())
    assert early.phase is Phase.RUNNING
    assert late.blocks == []
    generated = late.generated
    scheduler.end(early)
    run(scheduler, scheduler.schedule())
    assert late.phase is Phase.RUNNING
    assert late.generated == generated + 1


def test_a_higher_priority_overtakes_and_preempts() -> None:
    scheduler = make_scheduler(blocks=8, max_running=1)
    low, next_low, high = (make_sequence((n,) * 6, n, priority=p) for n, p in ((1, 0), (2, 0), (3, 5)))
    scheduler.add(low)
    run(scheduler, scheduler.schedule())
    scheduler.add(next_low)
    scheduler.add(high)
    run(scheduler, scheduler.schedule())
    assert (high.phase, low.phase, next_low.phase) == (Phase.RUNNING, Phase.WAITING, Phase.WAITING)
    assert scheduler.waiting == [low, next_low]


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    scheduler = make_scheduler(blocks=6)
    running, big, small = (make_sequence((n,) * size, n) for n, size in ((1, 9), (2, 16), (3, 2)))
    scheduler.add(running)
    run(scheduler, scheduler.schedule())
    scheduler.add(big)
    scheduler.add(small)
    run(scheduler, scheduler.schedule())
    assert scheduler.waiting == [big, small]


def test_equal_prompts_computed_together_share_blocks() -> None:
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
    scheduler.pool.allocate(), scheduler.pool.allocate()
    assert scheduler.pool.events[1:] == [KvRemoved((event_hash(names[2]),))]
    assert len(scheduler.pool.find(names)) == 2


def test_a_prompt_gets_all_its_blocks_when_it_is_admitted() -> None:
    scheduler = make_scheduler(blocks=8, batch_tokens=4)
    long, other = make_sequence((1,) * 20, 0), make_sequence((2,) * 12, 1)
    scheduler.add(long)
    scheduler.add(other)
    run(scheduler, scheduler.schedule())
    assert scheduler.pool.used == 5
    for _ in range(4):
        assert scheduler.waiting == [other], "blocks of an admitted prompt are not given to another"
        run(scheduler, scheduler.schedule())


def test_cached_blocks_count_as_free_only_once() -> None:
    scheduler = make_scheduler(blocks=4)
    first = make_sequence((1,) * 9, 0)
    scheduler.add(first)
    run(scheduler, scheduler.schedule())
    scheduler.end(first)
    scheduler.pool.allocate(), scheduler.pool.allocate()
    second = make_sequence((1,) * 9, 1)
    scheduler.add(second)
    assert scheduler.schedule() == Batch([], [])
    assert second.phase is Phase.WAITING


def test_after_a_clear_running_sequences_continue_and_publish_nothing() -> None:
    scheduler = make_scheduler(blocks=16)
    sequence = make_sequence(tuple(range(9)), 0)
    scheduler.add(sequence)
    run(scheduler, scheduler.schedule())
    scheduler.clear()
    for _ in range(8):
        run(scheduler, scheduler.schedule())
    kinds = [type(event) for event in scheduler.pool.events]
    assert kinds == [KvStored, KvCleared]


def produce(scheduler: Scheduler, sequence: Sequence, steps: int) -> list[KvComputed | None]:
    """Make steps; return the blocks of `sequence` that became final in each."""
    scheduler.add(sequence)
    computed = []
    for _ in range(steps):
        run(scheduler, scheduler.schedule())
        computed.append(sequence.take_computed_blocks(SIZE))
    return computed


def test_blocks_are_offered_when_they_are_full_and_the_last_with_the_whole_prompt() -> None:
    scheduler = make_scheduler(max_running=1, batch_tokens=5)
    sequence = make_sequence(tuple(range(14)), handoff=PRODUCE)
    computed = produce(scheduler, sequence, 3)
    numbers = tuple(sequence.blocks)
    assert computed == [KvComputed(numbers[:1]), KvComputed(numbers[1:2]), KvComputed(numbers[2:], complete=True)]


def test_a_step_that_fills_no_block_offers_none() -> None:
    scheduler = make_scheduler(max_running=1, batch_tokens=3)
    computed = produce(scheduler, make_sequence(tuple(range(6)), handoff=PRODUCE), 2)
    assert computed[0] is None
    assert computed[1] is not None
    assert computed[1].complete


def test_reused_blocks_are_offered_with_the_first() -> None:
    scheduler = make_scheduler(batch_tokens=32)
    first = make_sequence(tuple(range(9)), 0)
    scheduler.add(first)
    run(scheduler, scheduler.schedule())
    scheduler.end(first)
    second = make_sequence(tuple(range(9)), 1, handoff=PRODUCE)
    assert produce(scheduler, second, 1) == [KvComputed(tuple(second.blocks), complete=True, cached_tokens=8)]


def test_a_sequence_with_offered_blocks_is_not_preempted_and_frees_its_slot_when_done() -> None:
    scheduler = make_scheduler(blocks=6, max_running=1, batch_tokens=8)
    producer, high = make_sequence((1,) * 12, 0, handoff=PRODUCE), make_sequence((2,) * 9, 1, priority=5)
    assert produce(scheduler, producer, 1) != [None]
    scheduler.add(high)
    run(scheduler, scheduler.schedule())
    assert (producer.phase, high.phase) == (Phase.RUNNING, Phase.WAITING)
    assert scheduler.retract_all() == []
    scheduler.offer(producer)
    assert scheduler.in_handoff == 1
    run(scheduler, scheduler.schedule())
    assert high.phase is Phase.RUNNING
    scheduler.end(producer)
    assert scheduler.pool.used == 3


def test_a_receiving_sequence_has_blocks_but_takes_part_in_no_step() -> None:
    scheduler = make_scheduler(max_running=1)
    sequence = make_sequence(tuple(range(9)), handoff=CONSUME)
    scheduler.add(sequence)
    assert scheduler.schedule() == Batch([], [])
    assert scheduler.blocked
    assert scheduler.wanting == [sequence]
    assert sequence.wanted_blocks(SIZE) == KvWanted(0, tuple(sequence.blocks))
    assert len(sequence.blocks) == 3
    scheduler.received(sequence)
    assert scheduler.schedule() == Batch([], [Chunk(sequence, 8, 1)])
    assert [event.block_hashes for event in scheduler.pool.events] == [tuple(map(event_hash, sequence.hashes[:2]))]  # type: ignore[union-attr]


def test_a_sequence_that_stops_receiving_frees_its_slot_at_once() -> None:
    scheduler = make_scheduler(max_running=1)
    receiving, waiting = make_sequence((1,) * 9, 0, handoff=CONSUME), make_sequence((2,) * 9, 1)
    scheduler.add(receiving)
    scheduler.add(waiting)
    scheduler.schedule()
    assert scheduler.blocked
    scheduler.offer(receiving)
    assert not scheduler.blocked
    assert scheduler.schedule().prefills == [Chunk(waiting, 0, 9)]


def test_a_prompt_that_was_received_is_computed_here_after_a_preemption() -> None:
    scheduler = make_scheduler(reuse=False)
    sequence = make_sequence(tuple(range(9)), handoff=CONSUME)
    scheduler.add(sequence)
    scheduler.schedule()
    scheduler.received(sequence)
    scheduler.retract(sequence)
    assert scheduler.schedule().prefills == [Chunk(sequence, 0, 9)]


def test_a_cached_prompt_is_not_received() -> None:
    scheduler = make_scheduler()
    for arrival in range(2):
        sequence = make_sequence(tuple(range(9)), arrival, handoff=CONSUME if arrival else None)
        scheduler.add(sequence)
        run(scheduler, scheduler.schedule())
        assert sequence.generated == 1
    assert make_sequence((1,) * 9, score_prompt=True, handoff=CONSUME).consumes is False
    assert Sequence(sequence.work, 1, sequence.params, 1).consumes is False, (
        "a later choice reuses the prompt of the first"
    )


class Interleavings(RuleBasedStateMachine):
    """Submit, step, abort, retract, clear, offer and receive in any order, on a very small cache."""

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
        self.wanted: dict[Sequence, KvWanted] = {}
        self.offered: dict[Sequence, dict[int, Content]] = {}

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "tenant"]),
        limit=st.integers(1, 12),
        handoff=st.sampled_from([None, PRODUCE, CONSUME]),
    )
    def submit(self, prompt: list[int], priority: int, salt: str | None, limit: int, handoff: Handoff | None) -> None:
        sequence = make_sequence(tuple(prompt), self.arrivals, priority, salt, handoff=handoff)
        self.arrivals += 1
        self.limits[sequence] = 1 if sequence.produces else limit
        self.open.append(sequence)
        self.scheduler.add(sequence)

    @precondition(lambda self: self.open)
    @rule(token=st.integers(0, 1))
    def step(self, token: int) -> None:
        was_blocked, was_there = self.scheduler.blocked, bool(self.scheduler.running)
        batch = self.scheduler.schedule()
        chunks = [*batch.prefills, *batch.decodes]
        assert not (was_blocked and (chunks or was_there)), "while it is blocked there is no step to make"
        self.note_wanted()
        if not chunks:
            assert self.scheduler.blocked
            assert self.scheduler.offered or self.scheduler.receiving, "there is work, so something is computed"
            return
        assert not self.scheduler.blocked
        assert sum(chunk.length for chunk in chunks) <= self.budget
        assert len({chunk.sequence for chunk in chunks}) == len(chunks)
        assert all(chunk.length == 1 and chunk.last for chunk in batch.decodes)
        for chunk in chunks:
            self.write(chunk)
        for chunk in chunks:
            self.read(chunk)
        grown = run(self.scheduler, batch, token)
        for chunk in chunks:
            if chunk.sequence.produces:
                self.note_offered(chunk.sequence)
        for sequence in grown:
            if sequence.generated >= self.limits[sequence]:
                self.leave(sequence)

    def note_wanted(self) -> None:
        """A transfer writes into the blocks from now on: their content is undefined until then."""
        for sequence in self.scheduler.wanting:
            assert sequence.phase is Phase.RECEIVING
            assert not sequence.generated
            wanted = self.wanted[sequence] = sequence.wanted_blocks(SIZE)
            assert wanted.first + len(wanted.blocks) == -(-sequence.prompt_length // SIZE)
            for block in wanted.blocks:
                assert self.pool.holders(block) == 1
                assert self.pool.hash_of(block) is None
                for place in range(SIZE):
                    self.cache[block, place] = (-1,)
        self.scheduler.wanting = []

    def note_offered(self, sequence: Sequence) -> None:
        computed = sequence.take_computed_blocks(SIZE)
        if computed is not None:
            before = self.offered.setdefault(sequence, {})
            assert not before.keys() & set(computed.blocks), "a block is offered once"
            stop = sequence.prompt_length if computed.complete else (len(before) + len(computed.blocks)) * SIZE
            for number, block in enumerate(computed.blocks, len(before)):
                before[block] = tuple(
                    self.cache[block, position % SIZE]
                    for position in range(number * SIZE, min(stop, (number + 1) * SIZE))
                )
            rows = [row for content in before.values() for row in content]
            salted = (hash(sequence.work.cache_salt), *sequence.tokens)
            assert rows == [salted[: position + 2] for position in range(stop)], (
                "offered blocks have the KV of the prompt"
            )

    @precondition(lambda self: self.scheduler.receiving)
    @rule(which=st.integers(0, 100))
    def receive(self, which: int) -> None:
        receiving = sorted(self.scheduler.receiving, key=lambda sequence: sequence.rank)
        sequence = receiving[which % len(receiving)]
        wanted = self.wanted.pop(sequence)
        for position in range(wanted.first * SIZE, sequence.prompt_length):
            block = wanted.blocks[position // SIZE - wanted.first]
            self.cache[block, position % SIZE] = (hash(sequence.work.cache_salt), *sequence.tokens[: position + 1])
        self.scheduler.received(sequence)
        assert sequence.phase is Phase.RUNNING
        assert sequence.pending == 1

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 100))
    def fail(self, which: int) -> None:
        """Blocks that a transfer uses stay as they are."""
        self.leave(self.open[which % len(self.open)])

    @rule()
    def retract_all(self) -> None:
        for sequence in self.scheduler.retract_all():
            assert sequence not in self.offered

    def write(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        for position in range(chunk.start, chunk.start + chunk.length):
            block = sequence.blocks[position // SIZE]
            assert self.pool.holders(block) == 1, "a block that is written has one holder"
            assert self.pool.hash_of(block) is None, "and has no hash"
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

    @precondition(lambda self: any(not sequence.offered for sequence in self.scheduler.running))
    @rule(which=st.integers(0, 100))
    def retract(self, which: int) -> None:
        movable = [sequence for sequence in self.scheduler.running if not sequence.offered]
        self.scheduler.retract(movable[which % len(movable)])

    @rule()
    def clear(self) -> None:
        self.scheduler.clear()

    def leave(self, sequence: Sequence) -> None:
        """End it with an error."""
        if sequence.offered or sequence.phase is Phase.RECEIVING:
            self.scheduler.offer(sequence)
        else:
            self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        self.open.remove(sequence)
        self.offered.pop(sequence, None)
        self.wanted.pop(sequence, None)
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
            assert (sequence.phase is Phase.RECEIVING) == (sequence in self.scheduler.receiving)
            assert (sequence.phase is Phase.OFFERED) == (sequence in self.scheduler.offered)
        assert len(self.scheduler.running) + len(self.scheduler.receiving) <= self.max_running
        assert self.scheduler.running == sorted(self.scheduler.running, key=lambda sequence: sequence.rank)

    @invariant()
    def blocks_in_a_handoff_do_not_change(self) -> None:
        for sequence, offered in self.offered.items():
            assert sequence.blocks[: len(offered)] == list(offered)
            assert sequence.phase in (Phase.RUNNING, Phase.OFFERED)
            for block, content in offered.items():
                assert tuple(self.cache[block, place] for place in range(len(content))) == content
        for sequence, wanted in self.wanted.items():
            assert tuple(sequence.blocks[wanted.first :]) == wanted.blocks
            assert sequence.phase in (Phase.RECEIVING, Phase.OFFERED)
            assert all(self.cache[block, place] == (-1,) for block in wanted.blocks for place in range(SIZE))
        in_handoff = {*self.offered, *self.wanted}
        assert self.scheduler.in_handoff == len(in_handoff)

    @invariant()
    def events_match_the_hashes_in_the_pool(self) -> None:
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
        names = [self.pool.hash_of(block) for block in range(self.pool.total)]
        assert {event_hash(name) for name in names if name is not None} == self.known

    def teardown(self) -> None:
        if hasattr(self, "open"):
            for sequence in tuple(self.open):
                self.finish(sequence)
            assert self.pool.used == 0


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
