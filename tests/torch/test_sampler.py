"""Every rule of sampling against a plain reference, and no row that knows of another."""

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from baton.engines.torch.sampling.draws import uniform  # noqa: E402
from baton.engines.torch.sampling.logprobs import prompt_logprobs  # noqa: E402
from baton.engines.torch.sampling.sampler import Sampled, sample  # noqa: E402
from baton.engines.torch.sampling_params import make_sampling_params  # noqa: E402
from baton.engines.torch.sequence import Sequence  # noqa: E402
from baton.errors import BatonError, EngineFailed, InvalidRequest  # noqa: E402
from baton.models.defaults import SamplingDefaults  # noqa: E402
from baton.ports.engine import Work  # noqa: E402
from baton.protocol.ids import RequestId  # noqa: E402
from baton.protocol.requests import OutputOptions, Sampling, StopConditions  # noqa: E402

VOCAB = 23
INF = math.inf

LOGITS = st.lists(st.floats(-8, 8, width=16), min_size=VOCAB, max_size=VOCAB)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-6, 2e-5, 0.3, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, VOCAB - 1, VOCAB]),
    top_p=st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    presence_penalty=st.sampled_from([0.0, -2.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -1.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 100.0]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, VOCAB - 1).map(str), st.floats(-5, 5, width=16), max_size=3),
    seed=st.integers(-(2**63), 2**63 - 1),
)
HISTORIES = st.lists(st.integers(0, VOCAB - 1), max_size=6)


class FixedGuide:
    """A guide that allows the same tokens at every step."""

    done = False

    def __init__(self, allowed: set[int], vocab: int = VOCAB) -> None:
        self.allowed, self.vocab = allowed, vocab
        self.accepted: list[int] = []

    def mask(self) -> bytes:
        if not self.allowed:
            raise InvalidRequest("nothing can follow")
        return sum(1 << token for token in self.allowed).to_bytes((self.vocab + 7) // 8, "little")

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def make_sequence(
    sampling: Sampling | None = None,
    history: list[int] | None = None,
    stop: StopConditions | None = None,
    logprobs: int | None = None,
    index: int = 0,
    vocab: int = VOCAB,
    prompt: tuple[int, ...] = (1, 2, 2, 3),
) -> Sequence:
    work = Work(
        request_id=RequestId("r"),
        token_ids=prompt,
        max_tokens=100,
        sampling=sampling or Sampling(temperature=0.0),
        stop=stop or StopConditions(),
        output=OutputOptions(logprobs=logprobs),
        eos_token_ids=(0,),
    )
    sequence = Sequence(work, index, make_sampling_params(work, SamplingDefaults(), vocab), 0)
    sequence.tokens += history or []
    return sequence


def token_of(result: Sampled | BatonError) -> int:
    assert isinstance(result, Sampled)
    return result.token


def sample_one(logits: list[float], sequence: Sequence) -> Sampled | BatonError:
    (result,) = sample(torch.tensor([logits]), [sequence])
    return result


def edited(logits: list[float], sequence: Sequence) -> list[float]:
    """The reference for bias and penalties, in 32-bit arithmetic as the rule is written."""
    params, row = sequence.params, torch.tensor(logits)
    for token, value in params.logit_bias:
        row[token] += value
    output = Counter(sequence.tokens[sequence.prompt_length :])
    for token in set(sequence.tokens):
        if params.repetition_penalty != 1.0:
            row[token] = (
                row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
            )
        if count := output[token]:
            row[token] -= params.frequency_penalty * count
            row[token] -= params.presence_penalty
    values: list[float] = row.tolist()
    return values


def allowed_tokens(logits: list[float], sequence: Sequence, slack: float) -> set[int]:
    """The reference for what may be drawn: everything down to a least logit. `slack` widens or tightens each rule."""
    params, peak = sequence.params, max(logits)
    if params.greedy:
        return {token for token, value in enumerate(logits) if value >= peak - max(slack, 0.0)}
    weights = [math.exp((value - peak) / params.temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if params.top_k:
        least = logits[order[params.top_k - 1]] - slack
        order = [token for token in order if logits[token] >= least]
    if params.top_p < 1.0 and order:  # tightened, a tie leaves no token
        mass, total = 0.0, sum(weights[token] for token in order)
        for token in order:
            mass += weights[token]
            if mass >= (params.top_p + slack) * total:
                break
        least = logits[token] - slack
        order = [token for token in order if logits[token] >= least]
    return {token for token in order if weights[token] >= params.min_p * (1 - slack)}


@settings(max_examples=80, deadline=None)
@given(logits=LOGITS, sampling=SAMPLINGS, history=HISTORIES)
def test_a_sampled_token_is_allowed_by_top_k_top_p_and_min_p(
    logits: list[float], sampling: Sampling, history: list[int]
) -> None:
    sequence = make_sequence(sampling, history)
    token = token_of(sample_one(logits, sequence))
    assert token in allowed_tokens(edited(logits, sequence), sequence, 1e-3)


@settings(max_examples=40, deadline=None)
@given(logits=LOGITS, sampling=SAMPLINGS)
def test_every_allowed_token_can_be_sampled(logits: list[float], sampling: Sampling) -> None:
    """Chances that step evenly through (0, 1) meet every token whose share is wider than a step."""
    sequences = [make_sequence(sampling, index=index) for index in range(300)]
    row = edited(logits, sequences[0])
    drawn = {token_of(result) for result in sample(torch.tensor(logits).repeat(300, 1), sequences)}
    params = sequences[0].params
    assert drawn <= allowed_tokens(row, sequences[0], 1e-3)
    sure = allowed_tokens(row, sequences[0], -1e-3) if not params.greedy else {row.index(max(row))}
    weights = {token: math.exp((row[token] - max(row)) / max(params.temperature, 1e-9)) for token in sure}
    total = sum(math.exp((value - max(row)) / max(params.temperature, 1e-9)) for value in row)
    assert {token for token, weight in weights.items() if params.greedy or weight / total > 0.1} <= drawn


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_row_gives_the_same_token_alone_and_in_any_batch(data: st.DataObject) -> None:
    rows = data.draw(
        st.lists(st.tuples(LOGITS, SAMPLINGS, HISTORIES, st.none() | st.integers(0, 3)), min_size=1, max_size=5)
    )
    logits = torch.tensor([row for row, *_ in rows])

    def sequences() -> list[Sequence]:
        return [make_sequence(sampling, history, logprobs=top) for _, sampling, history, top in rows]

    together = sample(logits, sequences())
    alone = [sample(logits[row : row + 1], [sequence])[0] for row, sequence in enumerate(sequences())]
    assert list(map(token_of, together)) == list(map(token_of, alone))
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = sequences()
    again = sample(logits[list(order)], [shuffled[row] for row in order])
    assert [token_of(result) for result in again] == [token_of(together[row]) for row in order]


def test_a_large_vocabulary_gives_the_same_token_on_every_code_path() -> None:
    """Flat rows, where the first look is too short, and odd sizes, where the last block is not full."""
    generator = torch.Generator().manual_seed(5)
    for vocab in (4096, 10_007):
        logits = torch.randn(6, vocab, generator=generator) * torch.tensor([[0.0], [0.01], [0.5], [1.0], [3.0], [9.0]])
        logits[4] = logits[4].bfloat16().float()  # many ties
        samplings = [
            Sampling(seed=7, top_p=0.9),
            Sampling(seed=7, top_k=50),
            Sampling(seed=7, top_k=3000, top_p=0.5),
            Sampling(seed=7, min_p=0.2),
            Sampling(seed=7),
        ]
        for row, values in enumerate(logits):
            for sampling in samplings:
                sequence = make_sequence(sampling, vocab=vocab)
                alone = token_of(sample(logits[row : row + 1], [sequence])[0])
                assert alone in allowed_tokens(values.tolist(), sequence, 1e-5)
                others = [make_sequence(other, vocab=vocab) for other in samplings]
                batch = sample(torch.cat([logits[row].repeat(5, 1), logits[row : row + 1]]), [*others, sequence])
                assert token_of(batch[-1]) == alone


def test_top_k_of_all_but_one_samples_like_no_top_k() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(1))
    logits[0, 17] = -30.0
    for seed in range(50):
        pair = [make_sequence(Sampling(seed=seed, top_k=top_k), vocab=500) for top_k in (0, 499)]
        first, second = sample(logits.repeat(2, 1), pair)
        assert token_of(first) == token_of(second)


def test_sampled_frequencies_match_the_probabilities() -> None:
    count = 4000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.0, -INF])
    sampling = Sampling(seed=11, temperature=0.7)
    sequences = [make_sequence(sampling, index=index, vocab=6) for index in range(count)]
    drawn = Counter(token_of(result) for result in sample(logits.repeat(count, 1), sequences))
    expected = (logits / 0.7).softmax(0) * count
    assert 5 not in drawn
    chi = sum((drawn[token] - float(expected[token])) ** 2 / float(expected[token]) for token in range(5))
    assert chi < 18.5  # one seed in a thousand would fail, and this one does not change


def test_random_numbers_differ_by_seed_choice_and_position_and_stay_inside_0_and_1() -> None:
    numbers = {uniform(seed, index, at) for seed in (-1, 0, 1, 2**63 - 1) for index in range(9) for at in range(9)}
    assert len(numbers) == 4 * 81
    assert all(0.0 < number < 1.0 for number in numbers)
    assert uniform(1, 2, 3) == uniform(1, 2, 3)


def test_equal_logits_give_the_lowest_id() -> None:
    for vocab in (5, 256, 1000):
        for first in (0, 3, vocab - 2):
            row = [-1.0] * vocab
            row[first] = row[vocab - 1] = 2.0
            for sampling in (Sampling(temperature=0.0), Sampling(top_k=1), Sampling(top_p=0.0)):
                assert token_of(sample_one(row, make_sequence(sampling, vocab=vocab))) == first


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-38, 100.0])
def test_extreme_logits_and_temperatures_do_not_overflow(temperature: float) -> None:
    row = [0.0] * VOCAB
    row[4], row[5], row[6] = 3e38, -3e38, -INF
    assert token_of(sample_one(row, make_sequence(Sampling(temperature=temperature)))) == 4
    penalty = Sampling(temperature=temperature, repetition_penalty=1e-30)
    assert token_of(sample_one(row, make_sequence(penalty, prompt=(4,)))) == 4


BROKEN: list[Callable[[list[float]], list[float]]] = [
    lambda row: [math.nan, *row[1:]],
    lambda row: [*row[:-1], INF],
    lambda row: [-INF] * len(row),
    lambda row: [math.nan] * len(row),
    lambda row: [INF, math.nan, *row[2:]],
]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(seed=1), Sampling(seed=1, top_p=0.5)])
def test_a_row_with_nan_fails_alone(
    broken: Callable[[list[float]], list[float]], logprobs: int | None, sampling: Sampling
) -> None:
    good = [float(token) for token in range(VOCAB)]
    sequences = [make_sequence(sampling, logprobs=logprobs) for _ in range(3)]
    guide = sequences[1].guide = FixedGuide({1, 2})
    first, middle, last = sample(torch.tensor([good, broken(good), good]), sequences)
    assert isinstance(middle, EngineFailed)
    assert not guide.accepted
    assert first == last == sample_one(good, make_sequence(sampling, logprobs=logprobs))


def test_penalties_follow_a_sequence_as_it_grows() -> None:
    """The counts are kept from step to step; a fresh sequence with the same tokens agrees."""
    generator = random.Random(3)
    sampling = Sampling(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.2)
    growing = make_sequence(sampling)
    for _ in range(30):
        row = [generator.uniform(-1, 1) for _ in range(VOCAB)]
        token = token_of(sample_one(row, growing))
        fresh = make_sequence(sampling, growing.tokens[growing.prompt_length :])
        reference = edited(row, fresh)
        assert token == token_of(sample_one(row, fresh)) == reference.index(max(reference))
        growing.tokens.append(generator.choice([token, generator.randrange(VOCAB)]))


def test_presence_and_frequency_leave_the_prompt_alone_and_repetition_does_not() -> None:
    row = [0.0, 0.0, 1.0, 0.0, 0.9] + [0.0] * (VOCAB - 5)
    for sampling, token in (
        (Sampling(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0), 2),
        (Sampling(temperature=0.0, repetition_penalty=2.0), 4),
    ):
        assert token_of(sample_one(row, make_sequence(sampling, prompt=(2, 2)))) == token


def test_eos_and_stop_tokens_are_forbidden_before_min_tokens() -> None:
    row = [9.0, 8.0, 7.0] + [0.0] * (VOCAB - 3)
    stop = StopConditions(min_tokens=2, stop_token_ids_hidden=(1,))
    for history, token in (([], 2), ([5], 2), ([5, 5], 0)):
        assert token_of(sample_one(row, make_sequence(history=history, stop=stop))) == token
    drawn = make_sequence(Sampling(temperature=0.01, seed=1), stop=stop)
    assert token_of(sample_one(row, drawn)) == 2


def test_logits_are_not_changed() -> None:
    sampling = Sampling(seed=1, logit_bias={"3": 5.0}, repetition_penalty=2.0, top_p=0.5)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    sequences = [make_sequence(sampling), make_sequence(sampling)]
    sequences[0].guide = FixedGuide({4, 5})
    sample(logits, sequences)
    assert torch.equal(logits, before)
    assert sample(logits[:0], []) == []


def test_guided_and_unguided_rows_share_a_batch() -> None:
    row = [float(token) for token in range(VOCAB)]
    sequences = [make_sequence() for _ in range(4)] + [make_sequence(Sampling(seed=3, temperature=100.0))]
    guides = {0: FixedGuide({3, 7}), 2: FixedGuide({VOCAB - 2, 0}), 3: FixedGuide(set()), 4: FixedGuide({8, 9})}
    for position, guide in guides.items():
        sequences[position].guide = guide
    results = sample(torch.tensor([row] * 5), sequences)
    assert [token_of(result) for result in results[:3]] == [7, VOCAB - 1, VOCAB - 2]
    assert isinstance(results[3], InvalidRequest)
    assert token_of(results[4]) in (8, 9)
    assert [guide.accepted for guide in guides.values()] == [[7], [VOCAB - 2], [], [token_of(results[4])]]


def test_a_grammar_that_can_only_end_ends_before_min_tokens() -> None:
    row = [0.0] * VOCAB
    sequence = make_sequence(stop=StopConditions(min_tokens=5))
    sequence.guide = FixedGuide({0})
    assert token_of(sample_one(row, sequence)) == 0
    sequence.guide = FixedGuide({0, 9})
    assert token_of(sample_one(row, sequence)) == 9


def test_a_grammar_that_leaves_only_impossible_tokens_fails_the_row() -> None:
    row = [1.0, *([-INF] * (VOCAB - 1))]
    sequence = make_sequence()
    sequence.guide = FixedGuide({5})
    assert isinstance(sample_one(row, sequence), EngineFailed)


@settings(max_examples=60, deadline=None)
@given(logits=LOGITS, sampling=SAMPLINGS, top=st.sampled_from([0, 1, 4, VOCAB]))
def test_logprobs_are_of_the_raw_logits(logits: list[float], sampling: Sampling, top: int) -> None:
    reference = torch.tensor(logits).log_softmax(0).tolist()
    result = sample_one(logits, make_sequence(sampling, logprobs=top))
    assert isinstance(result, Sampled)
    assert result.logprobs is not None
    assert result.logprobs.chosen == pytest.approx([reference[result.token]], abs=1e-5)
    (leaders,) = result.logprobs.top
    # By value: logits that differ by less than a log-probability can tell are in any order.
    ids = [leader.token_id for leader in leaders]
    assert len(set(ids)) == top
    assert [reference[token] for token in ids] == pytest.approx(sorted(reference, reverse=True)[:top], abs=1e-6)
    assert [leader.rank for leader in leaders] == list(range(1, top + 1))
    assert [leader.logprob for leader in leaders] == pytest.approx([reference[token] for token in ids], abs=1e-5)


def test_logprobs_of_different_lengths_in_one_batch_over_a_large_vocabulary() -> None:
    logits = torch.randn(4, 3001, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    tops = [None, 5, 0, 5]
    results = sample(logits, [make_sequence(logprobs=top, vocab=3001) for top in tops])
    for row, top, result in zip(logits, tops, results, strict=True):
        assert isinstance(result, Sampled)
        assert (result.logprobs is None) == (top is None)
        if result.logprobs is not None:
            best = sorted(range(3001), key=lambda token: (-float(row[token]), token))[:top]
            assert [leader.token_id for leader in result.logprobs.top[0]] == best


def test_prompt_logprobs_are_computed_row_by_row() -> None:
    logits = torch.randn(130, VOCAB, generator=torch.Generator().manual_seed(4))
    targets = [row % VOCAB for row in range(130)]
    scored = prompt_logprobs(logits, targets, 2)
    reference = logits.log_softmax(1)
    assert scored.chosen == pytest.approx([float(reference[row, token]) for row, token in enumerate(targets)], abs=1e-5)
    assert [[leader.token_id for leader in leaders] for leaders in scored.top] == logits.topk(2).indices.tolist()
    assert prompt_logprobs(logits[:1], [3], 0).top == ((),)
    assert prompt_logprobs(logits[:0], [], 3).chosen == ()


def test_a_logprob_is_always_finite() -> None:
    logits = torch.tensor([[0.0, -INF, 1.0], [math.nan, 0.0, 0.0]])
    scored = prompt_logprobs(logits, [1, 1], 3)
    values = [*scored.chosen, *(leader.logprob for leaders in scored.top for leader in leaders)]
    assert all(map(math.isfinite, values))


def test_the_last_token_of_a_bad_word_is_excluded_where_it_would_complete_the_word() -> None:
    logits = [float(token) for token in range(VOCAB)]  # 22 is the best, then 21
    words = ((22,), (5, 21))

    def best(history: list[int], prompt: tuple[int, ...] = (1,)) -> int:
        work = Work(
            request_id=RequestId("r"),
            token_ids=prompt,
            max_tokens=9,
            sampling=Sampling(temperature=0.0),
            bad_words=words,
        )
        sequence = Sequence(work, 0, make_sampling_params(work, SamplingDefaults(), VOCAB), 0)
        sequence.tokens += history
        return token_of(sample_one(logits, sequence))

    assert best([]) == 21
    assert best([5]) == 20
    assert best([5, 6]) == 21
    assert best([], prompt=(1, 5)) == 21, "a word is one of the output alone"
