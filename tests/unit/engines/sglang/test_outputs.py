"""From SGLang's chunks to outputs: what is new, aligned, and how it ended."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engines.sglang.outputs import Choice, ChoiceUpdate
from baton.errors import BatonError, Cancelled, EngineFailed, InvalidRequest, Overloaded, PeerLost
from baton.ports.engine import Work
from baton.protocol.handoff import Bootstrap, Consume, Handoff
from baton.protocol.ids import RequestId
from baton.protocol.outputs import Finished, FinishReason, Logprobs, TopLogprob
from baton.protocol.requests import OutputOptions, StopConditions


def make_work(**changes: object) -> Work:
    asked: dict[str, object] = {"request_id": RequestId("r"), "token_ids": (1, 2), "max_tokens": 50}
    return Work(**(asked | changes))  # type: ignore[arg-type]


def chunk(ids: list[int], finish: dict[str, Any] | None = None, **meta: object) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"id": "rid", "finish_reason": finish, **meta}}


def read_all(chunks: list[dict[str, Any]], incremental: bool, **changes: object) -> list[ChoiceUpdate]:
    choice = Choice(make_work(**changes), 0, incremental)
    return [choice.read(one) for one in chunks]


def scores(ids: list[int]) -> dict[str, object]:
    """Return what SGLang says of these tokens."""
    return {
        "output_token_logprobs": [(-0.5 * token, token, None) for token in ids],
        "output_top_logprobs": [[(-0.1, token, None), (-0.2, token + 1, None)] for token in ids],
    }


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=8), st.booleans())
def test_d01_delta_and_cumulative_streams_read_the_same(parts: list[list[int]], scored: bool) -> None:
    output = OutputOptions(logprobs=2) if scored else OutputOptions()
    length = {"type": "length", "length": 9}
    deltas, wholes, so_far = [], [], list[int]()
    for number, part in enumerate(parts):
        so_far = so_far + part
        end = length if number == len(parts) - 1 else None
        deltas.append(chunk(part, end, **scores(part)))
        wholes.append(chunk(so_far, end, **scores(so_far)))
    by_delta, by_whole = read_all(deltas, True, output=output), read_all(wholes, False, output=output)
    assert by_delta == by_whole
    assert [token for update in by_delta for token in update.token_ids] == so_far
    if scored:
        scored = [score for update in by_delta if update.logprobs for score in update.logprobs.chosen]
        assert scored == [-0.5 * token for token in so_far]


def test_log_probabilities_are_aligned_and_ranked() -> None:
    update = Choice(make_work(output=OutputOptions(logprobs=1)), 0, True).read(chunk([4, 6], None, **scores([4, 6])))
    top = ((TopLogprob(1, 4, -0.1),), (TopLogprob(1, 6, -0.1),))
    assert update.logprobs == Logprobs((-2.0, -3.0), top), "one alternative was asked for, though two are there"
    bare = Choice(make_work(output=OutputOptions(logprobs=0)), 0, True).read(chunk([4], None, **scores([4])))
    assert bare.logprobs == Logprobs((-2.0,))


def test_log_probabilities_that_are_missing_are_an_error_and_not_a_shift() -> None:
    choice = Choice(make_work(output=OutputOptions(logprobs=0)), 0, True)
    with pytest.raises(EngineFailed, match="1 log-probabilities for 2"):
        choice.read(chunk([4, 6], None, output_token_logprobs=[(-1.0, 4, None)]))


def test_prompt_log_probabilities_begin_with_the_second_token() -> None:
    meta = {
        "input_token_logprobs": [(None, 1, None), (-0.25, 2, None), (-0.5, 3, None)],
        "input_top_logprobs": [None, [(-0.1, 7, None)], [(-0.2, 8, None)]],
    }
    asked = make_work(token_ids=(1, 2, 3), output=OutputOptions(prompt_logprobs=1))
    choice = Choice(asked, 0, True)
    top = ((TopLogprob(1, 7, -0.1),), (TopLogprob(1, 8, -0.2),))
    assert choice.read(chunk([9], None, **meta)).prompt_logprobs == Logprobs((-0.25, -0.5), top)
    assert choice.read(chunk([9], None, **meta)).prompt_logprobs is None, "once, with the first tokens"
    assert Choice(asked, 1, True).read(chunk([9], None, **meta)).prompt_logprobs is None, "of the first choice"
    with pytest.raises(EngineFailed, match="0 log-probabilities for 2"):
        Choice(asked, 0, True).read(chunk([9], None))


def test_d03_a_chunk_without_tokens_or_counts_is_a_sign_of_life() -> None:
    for idle in (chunk([]), {"output_ids": []}, {"meta_info": {}}, {}):
        assert Choice(make_work(), 0, True).read(idle) == ChoiceUpdate([])
    end = Choice(make_work(), 0, True).read(chunk([5], {"type": "length", "length": 1})).end
    assert end == Finished(FinishReason.LENGTH, 0), "no counts, no error"


@pytest.mark.parametrize(
    ("matched", "reason", "stop_reason"),
    [
        (2, FinishReason.EOS, None),
        (9, FinishReason.STOP, 9),
        ([4, 9], FinishReason.STOP, 9),
        ("text", FinishReason.STOP, "text"),
        (77, FinishReason.EOS, None),
        (None, FinishReason.EOS, None),
    ],
    ids=["the model's end", "the client's", "the last of several", "a text", "the end of a grammar", "nothing said"],
)
def test_why_an_answer_stopped(matched: object, reason: FinishReason, stop_reason: object) -> None:
    stop = StopConditions(stop_token_ids=(9,))
    choice = Choice(make_work(stop=stop, eos_token_ids=(2,)), 3, True)
    end = choice.read(chunk([1], {"type": "stop", "matched": matched}, cached_tokens=16)).end
    assert end == Finished(reason, 3, stop_reason, 16)  # type: ignore[arg-type]


CONSUME = Consume(source=Bootstrap(host="h", port=1, room=1))


@pytest.mark.parametrize(
    ("status", "handoff", "error"),
    [
        (None, None, Cancelled),
        (400, None, InvalidRequest),
        (404, None, InvalidRequest),
        (429, None, Overloaded),
        (503, None, Overloaded),
        (500, None, EngineFailed),
        (500, CONSUME, PeerLost),
        (400, CONSUME, InvalidRequest),
    ],
)
def test_d02_an_early_end_is_an_error_by_its_status(
    status: int | None, handoff: Handoff | None, error: type[BatonError]
) -> None:
    finish = {"type": "abort", "message": "too bad", "status_code": status, "err_type": None}
    update = Choice(make_work(handoff=handoff), 0, True).read(chunk([5], finish))
    assert update.token_ids == [], "SGLang repeats the last token there"
    assert type(update.end) is error
    assert "too bad" in str(update.end)


def test_d02_a_failure_after_the_first_token_is_not_the_peers() -> None:
    choice = Choice(make_work(handoff=CONSUME), 0, True)
    choice.read(chunk([5]))
    update = choice.read(chunk([], {"type": "abort", "message": "grammar", "status_code": 500}))
    assert type(update.end) is EngineFailed


def test_a_stop_token_ends_an_answer_that_ignores_the_models_end() -> None:
    stop = StopConditions(stop_token_ids=(9,), ignore_eos=True, min_tokens=3)
    choice = Choice(make_work(stop=stop), 0, True)
    assert choice.read(chunk([9, 1])) == ChoiceUpdate([9, 1]), "it comes too early"
    update = choice.read(chunk([4, 9, 5]))
    assert update == ChoiceUpdate([4, 9], None, Finished(FinishReason.STOP, 0, 9), cut=True)


def test_the_first_tokens_come_with_the_times_of_the_prompt() -> None:
    times = {"forward_entry_time": 1000.5, "queue_time": 0.25, "prefill_finished_time": 1001.0, "cached_tokens": 1}
    choice = Choice(make_work(), 0, True)
    first, second = choice.read(chunk([4], None, **times)), choice.read(chunk([5], None, **times))
    queued, began, computed = first.progress
    assert [each.phase for each in first.progress] == ["queued", "first_step", "prefill_chunk"]
    assert (began.at_ns - queued.at_ns, computed.at_ns - began.at_ns) == (250_000_000, 500_000_000)
    assert computed.tokens == 1
    assert second.progress == ()


def test_a_prompt_without_times_has_no_progress() -> None:
    assert Choice(make_work(), 0, True).read(chunk([4])).progress == ()
