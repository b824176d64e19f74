"""Core with a runner whose steps overlap: the next is started before the tokens of this one are read."""

from types import SimpleNamespace
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.engines import TorchOptions
from baton.engines.torch.core import Core
from baton.engines.torch.pending import ComputedStep, PendingStep, Sampling
from baton.engines.torch.runner import Runner
from baton.engines.torch.sampling.sampler import Sampled
from baton.engines.torch.sampling_params import make_sampling_params
from baton.engines.torch.scheduler import Batch, Chunk
from baton.engines.torch.sequence import Sequence
from baton.models.defaults import SamplingDefaults
from baton.ports.engine import Work
from baton.protocol.ids import RequestId
from baton.protocol.requests import StopConditions

STOP = 5


def token_of(tokens: list[int]) -> int:
    """The token that the model gives after `tokens`: it depends on all of them."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1009
    return value % 17


class Device:
    """What a device would have: tokens by cache slot, and the newest token of each sequence."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.slots: dict[int, int] = {}
        self.newest: dict[Sequence, int] = {}

    def compute(self, chunk: Chunk, tokens: list[int]) -> int:
        """Write the tokens of a chunk to the cache, and return what comes after all of the sequence's."""
        blocks = chunk.sequence.blocks
        for index, token in enumerate(tokens, chunk.start):
            self.slots[blocks[index // self.block] * self.block + index % self.block] = token
        seen = [
            self.slots[blocks[index // self.block] * self.block + index % self.block]
            for index in range(chunk.start + chunk.length)
        ]
        return token_of(seen)


class Started:
    """A started step; its tokens are known to the device."""

    sampled_on_device = True

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def wait(self) -> Sampling:
        return self._sampling


class OverlappingRunner:
    """Computes with `Device`. Rows in `undecided`, counted over all steps, need another step."""

    def __init__(self, overlaps: bool, blocks: int, undecided: frozenset[int]) -> None:
        self.blocks = blocks
        self.block = 4
        self.config = SimpleNamespace(diffusion=None)
        self.device = SimpleNamespace(type="cpu")
        self.weights_arena = self.kv_arena = SimpleNamespace(released=False)
        self.experts = self.slots = None
        self.overlaps = overlaps
        self.started_ahead = 0
        self._undecided = undecided
        self._rows = 0
        self._memory = Device(self.block)

    def settle(self) -> None:
        pass

    def start(self, batch: Batch) -> PendingStep:
        chunks = (*batch.prefills, *batch.decodes)
        found = [
            (chunk, self._memory.compute(chunk, chunk.sequence.tokens[chunk.start : chunk.start + chunk.length]))
            for chunk in chunks
        ]
        sampled = [(chunk.sequence, token) for chunk, token in found if chunk.last]
        return self._sampled(sampled) if self.overlaps else ComputedStep(self._results(sampled))

    def start_next(self, decodes: list[Chunk]) -> PendingStep:
        self.started_ahead += 1
        return self._sampled(
            [(one.sequence, self._memory.compute(one, [self._memory.newest[one.sequence]])) for one in decodes]
        )

    def _sampled(self, found: list[tuple[Sequence, int]]) -> PendingStep:
        kept = []
        for sequence, token in found:
            self._rows += 1
            wrong = self._rows in self._undecided
            self._memory.newest[sequence] = 0 if wrong else token
            if not wrong:
                kept.append((sequence, token))
        return Started(self._results(kept))

    def _results(self, found: list[tuple[Sequence, int]]) -> Sampling:
        return [(sequence, Sampled(token, None)) for sequence, token in found]


class Planned:
    """A request: its prompt, its most tokens, in which step it comes, and in which it is aborted."""

    def __init__(
        self, prompt: list[int], tokens: int, comes: int, aborted: int | None, choices: int = 1, priority: int = 0
    ) -> None:
        self.prompt = prompt
        self.tokens = tokens
        self.comes = comes
        self.aborted = aborted
        self.choices = choices
        self.priority = priority

    def sequences(self, number: int) -> list[Sequence]:
        work = Work(
            request_id=RequestId(str(number)),
            token_ids=tuple(self.prompt),
            max_tokens=self.tokens,
            stop=StopConditions(stop_token_ids=[STOP]),
            priority=self.priority,
        )
        params = make_sampling_params(work, SamplingDefaults(), 100)
        return [Sequence(work, index, params, number) for index in range(self.choices)]

    def expected(self) -> list[int]:
        tokens = list(self.prompt)
        for _ in range(self.tokens):
            tokens.append(token_of(tokens))
            if tokens[-1] == STOP:
                break
        return tokens[len(self.prompt) :]


def run(
    plans: list[Planned],
    overlaps: bool,
    blocks: int,
    undecided: frozenset[int],
    retracted: frozenset[int] = frozenset(),
) -> tuple[list[list[list[int]]], int]:
    """Return the tokens of each choice of each request, and how many steps were started ahead.

    Before the steps `retracted` all sequences return to the queue, as for an update of weights.
    """
    runner = OverlappingRunner(overlaps, blocks, undecided)
    core = Core(cast(Runner, runner), TorchOptions(block_size=4, max_running=3, batch_tokens=6))
    found: list[list[list[int]]] = [[[] for _ in range(plan.choices)] for plan in plans]
    step = 0
    while core.busy or step <= max(plan.comes for plan in plans):
        for number, plan in enumerate(plans):
            if plan.comes == step:
                core.add(plan.sequences(number))
            if plan.aborted is not None and plan.comes + plan.aborted == step:
                core.abort(RequestId(str(number)))
        if step in retracted:
            core.drain()
            core.scheduler.retract_all()
        if core.busy:
            core.step()
        if (result := core.take_result()) is not None:
            assert not result.failed
            for sampled in result.sampled:
                found[int(sampled.request_id)][sampled.choice].append(sampled.token)
        step += 1
        assert step < 5000
    assert core.scheduler.pool.used == 0
    return found, runner.started_ahead


PLANS = st.lists(
    st.builds(
        Planned,
        st.lists(st.integers(0, 3), min_size=1, max_size=12),
        st.integers(1, 12),
        st.integers(0, 6),
        st.one_of(st.none(), st.none(), st.integers(0, 6)),
        st.sampled_from([1, 1, 3]),
        st.sampled_from([0, 0, 1]),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(
    plans=PLANS,
    blocks=st.sampled_from([8, 12, 40]),
    undecided=st.frozensets(st.integers(1, 40), max_size=3),
    retracted=st.frozensets(st.integers(1, 12), max_size=2),
)
def test_tokens_are_those_of_steps_one_after_the_other(
    plans: list[Planned], blocks: int, undecided: frozenset[int], retracted: frozenset[int]
) -> None:
    """Whatever stops, is aborted, preempted, retracted, reused from the cache or sampled again."""
    found, _ = run(plans, True, blocks, undecided, retracted)
    for plan, choices in zip(plans, found, strict=True):
        expected = plan.expected()
        for tokens in choices:
            assert tokens == (expected if plan.aborted is None else expected[: len(tokens)])


def test_steps_of_decodes_are_started_ahead() -> None:
    plans = [Planned([number], 12, 0, None) for number in range(3)]
    tokens, ahead = run(plans, True, 40, frozenset())
    assert tokens == [[plan.expected()] for plan in plans]
    assert ahead > 0
    assert run(plans, False, 40, frozenset()) == (tokens, 0)


def test_a_command_sees_no_step_in_flight() -> None:
    runner = OverlappingRunner(True, 40, frozenset())
    core = Core(cast(Runner, runner), TorchOptions(block_size=4, max_running=3))
    work = Work(request_id=RequestId("a"), token_ids=(1, 2), max_tokens=60)
    core.add([Sequence(work, 0, make_sampling_params(work, SamplingDefaults(), 100), 0)])
    core.step()
    first = core.take_result()
    assert first is not None
    assert len(first.sampled) == 1
    core.drain()
    second = core.take_result()
    assert second is not None
    assert len(second.sampled) == 1
    assert core.busy
    core.abort(RequestId("a"))
    assert not core.busy
