"""What a request asks to know of its own prompt: it is sent once, before the first token."""

from collections.abc import Sequence

import msgspec
import pytest

from baton.errors import Unsupported
from baton.handlers.aggregated import AggregatedHandler
from baton.ports.engine import Capabilities
from baton.protocol.outputs import (
    Chunk,
    Finished,
    FinishReason,
    Logprobs,
    PromptCached,
    PromptScored,
    TokenDelta,
    TopLogprob,
    Usage,
)
from baton.protocol.requests import GenerateRequest, OutputOptions, Sampling, StopConditions
from baton.request.gate import Gate
from baton.request.tracker import RequestLimits, RequestTracker
from baton.testing import RecordingObserver, ScriptedEngine, run_bounded
from baton.testing.fakes import SCRIPTED_INFO, Script
from baton.testing.memory_runtime import MemoryContext

CAN = Capabilities(max_logprobs=20, prompt_logprobs=True, bad_words=True, max_choices=2)
SCORES = Logprobs((-0.5, -1.5), ((TopLogprob(1, 98, -0.5),), (TopLogprob(1, 120, -0.25),)))
LAST = Finished(FinishReason.EOS, cached_tokens=0)
SCRIPT: Script = [PromptCached(0), PromptScored(SCORES), TokenDelta([100]), 0.01, TokenDelta([101]), LAST]


class Letters:
    """A TokenTexts whose tokens are letters."""

    def text_of(self, token_id: int) -> str:
        return chr(token_id)

    def decode(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        return "".join(map(chr, token_ids)), list(range(len(token_ids)))

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def make(script: Script, texts: Letters | None) -> tuple[AggregatedHandler, ScriptedEngine]:
    engine = ScriptedEngine(script, capabilities=CAN)
    tracker = RequestTracker(Gate(8), RequestLimits(), RecordingObserver(), "aggregated", lambda _: None)
    info = msgspec.structs.replace(SCRIPTED_INFO, vocab_size=None)
    return AggregatedHandler(engine, info, tracker, texts=texts), engine


def ask(script: Script, output: OutputOptions, max_tokens: int = 5, texts: Letters | None = None) -> list[Chunk]:
    async def body() -> list[Chunk]:
        handler, _ = make(script, texts)
        request = GenerateRequest(token_ids=(97, 98, 99), stop=StopConditions(max_tokens=max_tokens), output=output)
        return [chunk async for chunk in handler.generate(request, MemoryContext())]

    return run_bounded(body())


def test_log_probabilities_come_before_the_first_token() -> None:
    first, *rest = ask(SCRIPT, OutputOptions(prompt_logprobs=1), texts=Letters())
    assert first.prompt is not None
    assert first.prompt.logprobs == [
        None,
        {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}},
        {
            "99": {"logprob": -1.5, "rank": None, "decoded_token": "c"},
            "120": {"logprob": -0.25, "rank": 1, "decoded_token": "x"},
        },
    ]
    assert (first.prompt.text, first.prompt.token_ids) == (None, None)
    assert [chunk.token_ids for chunk in rest] == [[100], [101]]
    assert [chunk.prompt for chunk in rest] == [None, None]


def test_log_probabilities_need_no_tokenizer() -> None:
    first, *_ = ask(SCRIPT, OutputOptions(prompt_logprobs=0))
    assert first.prompt is not None
    assert first.prompt.logprobs is not None
    assert first.prompt.logprobs[1] == {"98": {"logprob": -0.5, "rank": 1}}


def test_an_echo_has_the_text_the_tokens_and_where_they_begin() -> None:
    first, *_ = ask([TokenDelta([100]), LAST], OutputOptions(echo=True), texts=Letters())
    data = first.prompt
    assert data is not None
    assert (data.text, data.tokens, data.offsets) == ("abc", ["a", "b", "c"], [0, 1, 2])
    assert (data.token_ids, data.logprobs) == ([97, 98, 99], None)


def test_an_echo_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(Unsupported, match="echo"):
        ask([TokenDelta([100]), LAST], OutputOptions(echo=True))


def test_token_ids_are_returned_alone() -> None:
    first, *_ = ask([TokenDelta([100]), LAST], OutputOptions(return_token_ids=True))
    assert first == Chunk([], prompt=first.prompt)
    assert first.prompt is not None
    assert (first.prompt.token_ids, first.prompt.text) == ([97, 98, 99], None)


def test_a_request_that_only_scores_returns_no_tokens() -> None:
    script: Script = [PromptCached(0), PromptScored(SCORES), TokenDelta([100]), LAST]
    first, last = ask(script, OutputOptions(prompt_logprobs=0, logprobs=1), max_tokens=0)
    assert first.prompt is not None
    assert last == Chunk([], finish_reason=FinishReason.LENGTH, usage=Usage(3, 0, 0))


def test_a_request_for_no_tokens_returns_its_prompt_without_the_engine() -> None:
    first, last = ask([], OutputOptions(echo=True), max_tokens=0, texts=Letters())
    assert first.prompt is not None
    assert (first.prompt.text, first.prompt.token_ids) == ("abc", [97, 98, 99])
    assert last == Chunk([], finish_reason=FinishReason.LENGTH, usage=Usage(3, 0))


def test_bad_words_reach_the_engine_as_tokens_with_and_without_a_space() -> None:
    async def body() -> None:
        handler, engine = make([TokenDelta([100]), LAST], Letters())
        asked = GenerateRequest(
            token_ids=(97,), stop=StopConditions(max_tokens=1), sampling=Sampling(bad_words=("ab", " c"))
        )
        assert [chunk async for chunk in handler.generate(asked, MemoryContext())]
        assert engine.submitted[0].bad_words == ((97, 98), (32, 97, 98), (99,), (32, 99))

    run_bounded(body())
