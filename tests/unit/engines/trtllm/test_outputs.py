"""From results to a stream: no token twice, one log-probability for each, legal finish reasons only."""

import asyncio
import math
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.engine_kit.output_stream import OutputStream
from baton.engines.trtllm.outputs import UNKNOWN_LOGPROB, ResultReader
from baton.errors import EngineFailed
from baton.ports.engine import Work
from baton.protocol.handoff import Produce
from baton.protocol.ids import new_request_id
from baton.protocol.outputs import Finished, FinishReason, HandoffReady, Logprobs, PromptCached, TokenDelta
from baton.protocol.requests import OutputOptions, Sampling, StopConditions
from baton.testing import run_bounded
from tests.doubles.trtllm import World, make_library
from tests.doubles.trtllm_facts import fact_class, load_facts

LIBRARY = make_library("1.3.0rc22", World(), CollectorRegistry())
FACTS = load_facts()
Output = fact_class(FACTS["1.3.0rc22"], "executor.result.CompletionOutput")


class Result:
    """A result as the engine returns it: the same object, changed between two reads."""

    def __init__(self, choices: int = 1) -> None:
        self.outputs: list[Any] = [Output(index=index) for index in range(choices)]
        self.finished = False
        self.cached_tokens = 0
        self.prompt_token_ids = [1, 2, 3]


class Case:
    """One request: change `result`, call `push`, check the outputs of the stream."""

    def __init__(self, choices: int = 1, sampling: Sampling | None = None, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "request_id": new_request_id("o"),
            "token_ids": (1, 2, 3),
            "max_tokens": 4,
            "eos_token_ids": (99,),
            "sampling": sampling or Sampling(n=choices),
        }
        self.work = Work(**(fields | changes))
        self.result: Any = Result(choices)
        self.stream = OutputStream(self.work.sampling.n or 1)
        self.reader = ResultReader(self.work, self.stream, LIBRARY, context=2048)

    @property
    def output(self) -> Any:
        return self.result.outputs[0]

    async def push(self, reason: str | None = None, **changes: Any) -> list[Any]:
        if reason is not None:
            self.result.finished = True
            self.output.finish_reason = reason
        for name, value in changes.items():
            setattr(self.output, name, value)
        self.reader.push(self.result)
        try:
            outputs = await asyncio.wait_for(self.stream.read(), 0.01)
        except TimeoutError:
            return []
        return [output for output in outputs if not isinstance(output, PromptCached)]


def score(logprob: float, rank: int | None = None) -> Any:
    return LIBRARY.logprob(logprob=logprob, rank=rank)


def check(body: Any) -> None:
    run_bounded(body())


def test_only_new_tokens_of_a_result_are_pushed() -> None:
    async def body() -> None:
        case = Case()
        tokens: list[int] = []
        case.output.token_ids = tokens
        tokens.append(5)
        assert await case.push() == [TokenDelta([5])]
        assert await case.push() == []
        tokens += [6, 7]
        assert await case.push() == [TokenDelta([6, 7])]
        tokens.append(8)
        assert await case.push("length") == [TokenDelta([8]), Finished(FinishReason.LENGTH, cached_tokens=0)]

    check(body)


def test_tokens_that_the_engine_removes_stay_pushed_and_are_not_pushed_again() -> None:
    async def body() -> None:
        case = Case()
        assert await case.push(token_ids=[5, 6, 7]) == [TokenDelta([5, 6, 7])]
        assert await case.push(token_ids=[5]) == []
        assert await case.push(token_ids=[5, 6, 7]) == []
        (end,) = await case.push("stop", token_ids=[5], stop_reason="word")
        assert end == Finished(FinishReason.STOP, stop_reason="word", cached_tokens=0)

    check(body)


def test_a_result_without_tokens_is_no_error() -> None:
    async def body() -> None:
        case = Case()
        assert await case.push(token_ids=None) == []
        assert await case.push("length", token_ids=None) == [Finished(FinishReason.LENGTH, cached_tokens=0)]

    check(body)


@pytest.mark.parametrize(
    ("reason", "stop_reason", "expected"),
    [
        ("stop", None, (FinishReason.EOS, None)),
        ("stop", 99, (FinishReason.EOS, None)),
        ("stop", 5, (FinishReason.STOP, 5)),
        ("length", None, (FinishReason.LENGTH, None)),
        ("cancelled", None, (FinishReason.CANCELLED, None)),
    ],
)
def test_d02_every_finish_reason_of_the_engine_maps_to_a_legal_one(
    reason: str, stop_reason: Any, expected: Any
) -> None:
    async def body() -> None:
        case = Case()
        *_, end = await case.push(reason, token_ids=[5], stop_reason=stop_reason)
        assert (end.reason, end.stop_reason) == expected

    check(body)


@pytest.mark.parametrize("reason", ["timeout", "not_finished", "something new"])
def test_d02_an_unknown_finish_reason_is_an_error(reason: str) -> None:
    async def body() -> None:
        with pytest.raises(EngineFailed, match=reason):
            await Case().push(reason, token_ids=[5])

    check(body)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([5, 99], (FinishReason.EOS, None)),
        ([5, 7], (FinishReason.STOP, 7)),
        ([5, 6, 8, 5], (FinishReason.LENGTH, None)),
    ],
)
def test_d02_a_missing_finish_reason_follows_from_the_tokens(tokens: list[int], expected: Any) -> None:
    async def body() -> None:
        case = Case(stop=StopConditions(stop_token_ids=(7,)))
        case.result.finished = True
        *_, end = await case.push(token_ids=tokens)
        assert (end.reason, end.stop_reason) == expected

    check(body)


def test_d02_a_missing_finish_reason_that_does_not_follow_is_an_error() -> None:
    async def body() -> None:
        case = Case()
        case.result.finished = True
        with pytest.raises(EngineFailed, match="without a reason"):
            await case.push(token_ids=[5])

    check(body)


def test_each_choice_is_pushed_and_ends_by_itself() -> None:
    async def body() -> None:
        case = Case(choices=2)
        first, second = case.result.outputs
        first.token_ids, second.token_ids = [1], [7, 8]
        assert await case.push() == [TokenDelta([1], 0), TokenDelta([7, 8], 1)]
        second.token_ids, second.finish_reason = [7, 8, 9], "length"
        outputs = await case.push()
        assert outputs == [TokenDelta([9], 1), Finished(FinishReason.LENGTH, 1, cached_tokens=0)]
        first.token_ids = [1, 2]
        second.token_ids = [7, 8, 9, 10]
        assert await case.push() == [TokenDelta([2], 0)]

    check(body)


def test_greedy_choices_are_computed_once_and_pushed_for_each() -> None:
    async def body() -> None:
        case = Case(sampling=Sampling(n=3, temperature=0.0))
        outputs = await case.push("length", token_ids=[5, 6])
        assert [output.token_ids for output in outputs[:3]] == [[5, 6]] * 3
        assert [output.index for output in outputs[3:]] == [0, 1, 2]
        outputs[0].token_ids.append(1)
        assert outputs[1].token_ids == [5, 6], "no list is shared"
        assert case.stream.ended

    check(body)


@pytest.mark.parametrize("missing", [None, {}, {42: score(-1.0)}], ids=["none", "empty", "another token"])
def test_d05_a_missing_log_probability_does_not_shift_the_others(missing: Any) -> None:
    async def body() -> None:
        case = Case(output=OutputOptions(logprobs=1))
        given = [{5: score(-0.5, 1)}, missing, {7: score(-0.25, 1)}]
        (delta,) = await case.push(token_ids=[5, 6, 7], logprobs=given)
        assert delta.logprobs.chosen == (-0.5, UNKNOWN_LOGPROB, -0.25)
        assert len(delta.logprobs.top) == 3
        assert not math.isinf(UNKNOWN_LOGPROB)

    check(body)


def test_d05_every_token_has_one_log_probability() -> None:
    async def body() -> None:
        case = Case(output=OutputOptions(logprobs=0))
        assert await case.push(token_ids=[5, 6], logprobs=[-0.5]) == [TokenDelta([5], logprobs=Logprobs((-0.5,)))], (
            "a token waits for its log-probability"
        )
        (delta,) = await case.push(token_ids=[5, 6], logprobs=[-0.5, -1.5, -9.0])
        assert (delta.token_ids, delta.logprobs.chosen) == ([6], (-1.5,))
        *deltas, _ = await case.push("length", token_ids=[5, 6, 7, 8], logprobs=[-0.5, -1.5, float("nan")])
        assert deltas[0].logprobs.chosen == (UNKNOWN_LOGPROB, UNKNOWN_LOGPROB)

    check(body)


def test_log_probabilities_that_are_all_missing_are_an_error() -> None:
    async def body() -> None:
        for output in (OutputOptions(logprobs=0), OutputOptions(prompt_logprobs=0)):
            with pytest.raises(EngineFailed, match="logprobs"):
                await Case(output=output).push("length", token_ids=[5], logprobs=[], prompt_logprobs=[])

    check(body)


def test_alternatives_are_sorted_by_rank_and_limited_to_the_requested_number() -> None:
    async def body() -> None:
        case = Case(output=OutputOptions(logprobs=2))
        entry = {9: score(-3.0, 7), 4: score(-0.2, 2), 8: score(-0.1, 1)}
        (delta,) = await case.push(token_ids=[9], logprobs=[entry])
        assert delta.logprobs.chosen == (-3.0,)
        assert [(each.rank, each.token_id) for each in delta.logprobs.top[0]] == [(1, 8), (2, 4)]

    check(body)


def test_infinite_log_probabilities_become_finite() -> None:
    async def body() -> None:
        case = Case(output=OutputOptions(logprobs=1))
        (delta,) = await case.push(token_ids=[5, 6], logprobs=[{5: score(-math.inf)}, {6: score(1e-9)}])
        assert delta.logprobs.chosen == (UNKNOWN_LOGPROB, 0.0)

    check(body)


def test_prompt_log_probabilities_start_at_the_second_token() -> None:
    async def body() -> None:
        case = Case(output=OutputOptions(prompt_logprobs=1))
        case.output.prompt_logprobs = [{2: score(-1.0, 1)}, {3: score(-2.0, 1)}, {5: score(-3.0, 1)}]
        scored, _ = await case.push(token_ids=[5])
        assert scored.logprobs.chosen == (-1.0, -2.0)
        assert [type(output) for output in await case.push("length", token_ids=[5, 6])] == [TokenDelta, Finished]

    check(body)


@pytest.mark.parametrize(("reported", "counted"), [(0, 0), (2, 2), (32, 3), (-1, 0)])
def test_cached_tokens_are_at_most_the_length_of_the_prompt(reported: int, counted: int) -> None:
    async def body() -> None:
        case = Case()
        case.result.cached_tokens = reported
        *_, end = await case.push("length", token_ids=[5])
        assert end.cached_tokens == counted

    check(body)


def test_handoff_parameters_precede_the_tokens_of_a_prefill() -> None:
    async def body() -> None:
        case = Case(handoff=Produce(), max_tokens=1)
        params = LIBRARY.disaggregated_params(request_type="context_only", opaque_state=b"\x00\xff", ctx_request_id=3)
        ready, delta, end = await case.push("not_finished", token_ids=[5], disaggregated_params=params)
        assert ready == HandoffReady({"request_type": "context_only", "ctx_request_id": 3, "opaque_state": "AP8="})
        assert (delta.token_ids, end.reason) == ([5], FinishReason.LENGTH)
        nothing = Case(handoff=Produce(), max_tokens=1)
        with pytest.raises(EngineFailed, match="location of its KV"):
            await nothing.push("not_finished", token_ids=[5])

    check(body)


def test_the_last_result_has_the_times_of_the_prompt() -> None:
    async def body() -> None:
        case = Case()
        times = SimpleNamespace(
            arrival_time=timedelta(seconds=5),
            first_scheduled_time=timedelta(seconds=6),
            first_token_time=timedelta(seconds=0),
        )
        await case.push("length", token_ids=[5], request_perf_metrics=SimpleNamespace(timing_metrics=times))
        assert [(each.phase, each.at_ns) for each in case.stream.progress] == [
            ("queued", 5_000_000_000),
            ("first_step", 6_000_000_000),
        ]

    run_bounded(body())
