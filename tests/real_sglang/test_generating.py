"""What the real SGLang makes of a request: every option is followed, and none without being told so."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.engines.sglang.params import escape
from baton.errors import Cancelled, InvalidRequest, Unsupported
from baton.ports.engine import Stream, Work
from baton.protocol.events import KvStored
from baton.protocol.ids import RequestId, new_request_id
from baton.protocol.outputs import Finished, FinishReason, Logprobs, PromptScored, TokenDelta
from baton.protocol.requests import GuidedDecoding, OutputOptions, Sampling, StopConditions
from baton.testing.bounded import eventually
from baton.testing.engine_session import Session, read_to_the_end
from tests.real_sglang.engines import Bench, TestedEngine, kv_events
from tests.real_sglang.hardware import SCORE_TOLERANCE
from tests.real_sglang.peers import START_S

PROMPT = tuple(range(40, 80))
NAMES = (3783480490812179100,)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


@pytest.fixture
def engine(bench: Bench, tiny: Path) -> "Engines":
    return Engines(bench, lambda: TestedEngine(tiny, "null", "--enable-priority-scheduling"))


class Engines:
    """Runs tests on the one engine of a module."""

    def __init__(self, bench: Bench, make: Any) -> None:
        self._bench = bench
        self._make = make

    def run(self, body: Any, limit_s: float = 90.0) -> Any:
        """Run `body` with a session of the engine; take back what it leaves."""

        async def whole() -> Any:
            async with self._session() as session:
                return await body(session)

        self._bench.run(self._bench.session(self._make), START_S)
        return self._bench.run(whole(), limit_s)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        try:
            yield await self._bench.session(self._make)
        finally:
            await self._bench.tidy()


def work(tokens: int = 12, prompt: tuple[int, ...] = PROMPT, **changes: Any) -> Work:
    """Return work that makes exactly `tokens` tokens unless `changes` say otherwise."""
    asked: dict[str, Any] = {
        "request_id": new_request_id("test"),
        "token_ids": prompt,
        "max_tokens": tokens,
        "sampling": Sampling(temperature=0.0),
        "stop": StopConditions(ignore_eos=True),
    }
    return Work(**(asked | changes))


async def answer_of(session: Session, asked: Work) -> tuple[list[int], Finished, list[Logprobs]]:
    """Return the tokens of the one choice, how it ended, and the log-probabilities of the prompt and of its tokens."""
    stream = session.engine.submit(asked)
    tokens: list[int] = []
    scores: list[Logprobs] = []
    while outputs := await stream.read():
        for output in outputs:
            if isinstance(output, TokenDelta):
                tokens += output.token_ids
                scores += [output.logprobs] if output.logprobs else []
            elif isinstance(output, PromptScored):
                scores.append(output.logprobs)
            elif isinstance(output, Finished):
                end = output
    return tokens, end, scores


def text_of(tokens: list[int], model: Path) -> str:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def test_log_probabilities_of_answer_and_prompt_agree(engine: Engines) -> None:
    async def body(session: Session) -> None:
        tokens, _, scores = await answer_of(session, work(16, output=OutputOptions(logprobs=2)))
        chosen = [value for part in scores for value in part.chosen]
        best = [position[0] for part in scores for position in part.top]
        assert [alternative.rank for alternative in best] == [1] * 16
        assert [alternative.token_id for alternative in best] == tokens, "greedy takes the best"
        whole = work(2, prompt=(*PROMPT, *tokens), output=OutputOptions(prompt_logprobs=1))
        _, _, (of_prompt,) = await answer_of(session, whole)
        assert len(of_prompt.chosen) == len(PROMPT) + 16 - 1
        assert of_prompt.chosen[-16:] == pytest.approx(chosen, abs=SCORE_TOLERANCE)
        assert [position[0].token_id for position in of_prompt.top[-16:]] == tokens

    engine.run(body)


def test_every_choice_is_its_own_and_ends_once(engine: Engines) -> None:
    async def body(session: Session) -> None:
        asked = work(24, sampling=Sampling(n=3, temperature=1.0))
        answer = await read_to_the_end(session.engine.submit(asked), choices=3)
        assert [len(tokens) for tokens in answer.tokens] == [24, 24, 24]
        assert len({tuple(tokens) for tokens in answer.tokens}) == 3

    engine.run(body)


def test_d08_a_long_prompt_is_cancelled_before_its_first_output(engine: Engines) -> None:
    async def body(session: Session) -> None:
        asked = work(1000, prompt=PROMPT * 70)
        stream = session.engine.submit(asked)
        await asyncio.sleep(0.005)  # it is inside SGLang, and has not answered
        await session.engine.abort(asked.request_id)
        with pytest.raises(Cancelled):
            await stream.read()
        await session.as_at_the_start(20)

    engine.run(body)


def test_d09_a_request_is_aborted_and_not_those_whose_ids_begin_alike(engine: Engines) -> None:
    async def body(session: Session) -> None:
        first, second = (work(300, request_id=RequestId(name)) for name in ("trace.1", "trace.10"))
        streams = [session.engine.submit(asked) for asked in (first, second)]
        await asyncio.gather(*(stream.read() for stream in streams))
        await session.engine.abort(first.request_id)
        with pytest.raises(Cancelled):
            await read_to_the_end(streams[0])
        assert (await read_to_the_end(streams[1])).ends[0] is not None

    engine.run(body)


@pytest.mark.parametrize(
    ("guide", "fits"),
    [
        (GuidedDecoding(regex="[ab]{3}c"), r"[ab]{3}c"),
        (GuidedDecoding(choice=("x (y)", "1+1=2.")), r"x \(y\)|1\+1=2\."),
        (GuidedDecoding(grammar='root ::= "yes" | "no"'), r"yes|no"),
        (GuidedDecoding(json={"enum": ["left", "right"]}), r'"(left|right)"'),
    ],
    ids=["regex", "choice", "grammar", "json"],
)
def test_d06_guided_output_has_the_shape(engine: Engines, tiny: Path, guide: GuidedDecoding, fits: str) -> None:
    async def body(session: Session) -> None:
        asked = work(40, sampling=Sampling(temperature=1.0, guided_decoding=guide), stop=StopConditions())
        tokens, end, _ = await answer_of(session, asked)
        assert re.fullmatch(fits, text_of(tokens, tiny)), text_of(tokens, tiny)
        assert end.reason is FinishReason.EOS

    engine.run(body)


def test_d06_a_structural_tag_is_followed(engine: Engines, tiny: Path) -> None:
    tag = {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</a>"},
    }

    async def body(session: Session) -> None:
        guide = GuidedDecoding(structural_tag=tag)
        tokens, _, _ = await answer_of(
            session, work(40, sampling=Sampling(temperature=1.0, guided_decoding=guide), stop=StopConditions())
        )
        assert re.fullmatch(r"<a>[0-9]{2}</a>", text_of(tokens, tiny)), text_of(tokens, tiny)

    engine.run(body)


def test_an_impossible_shape_fails_its_request_alone(engine: Engines) -> None:
    async def body(session: Session) -> None:
        broken = GuidedDecoding(grammar="root ::= nowhere")
        with pytest.raises(InvalidRequest):
            await answer_of(session, work(8, sampling=Sampling(guided_decoding=broken), stop=StopConditions()))
        assert len((await answer_of(session, work(8)))[0]) == 8

    engine.run(body)


def test_d06_min_tokens_holds_the_end_back(engine: Engines) -> None:
    async def body(session: Session) -> None:
        tokens, _, _ = await answer_of(session, work(30))
        stop = tokens[4]
        first = tokens.index(stop)
        conditions = StopConditions(stop_token_ids=(stop,))
        short, end, _ = await answer_of(session, work(30, stop=conditions))
        assert (len(short), end.reason, end.stop_reason) == (first + 1, FinishReason.STOP, stop)
        held = msgspec.structs.replace(conditions, min_tokens=20)
        assert len((await answer_of(session, work(30, stop=held)))[0]) >= 20

    engine.run(body)


def test_output_ends_where_a_regular_expression_matches(engine: Engines, tiny: Path) -> None:
    async def body(session: Session) -> None:
        tokens, _, _ = await answer_of(session, work(12))
        text = text_of(tokens, tiny)
        letter = next(letter for letter in text if letter.isascii() and letter.isprintable())
        stop = StopConditions(stop_regex=("never matches", f"[{escape(letter)}]"))
        found, end, _ = await answer_of(session, work(12, stop=stop))
        assert found == tokens[: len(found)]
        assert text_of(found, tiny).endswith(letter)
        assert end.reason is FinishReason.STOP

    engine.run(body)


def test_a_bias_and_a_penalty_change_the_answer(engine: Engines) -> None:
    async def body(session: Session) -> None:
        plain, _, _ = await answer_of(session, work(20))
        biased = Sampling(temperature=0.0, logit_bias={"77": 100.0})
        assert (await answer_of(session, work(20, sampling=biased)))[0] == [77] * 20
        fined = Sampling(temperature=0.0, logit_bias={"77": 25.0}, frequency_penalty=2.0)
        assert (await answer_of(session, work(20, sampling=fined)))[0] != [77] * 20
        assert (await answer_of(session, work(20)))[0] == plain

    engine.run(body)


def test_zero_is_a_value(engine: Engines) -> None:
    async def body(session: Session) -> None:
        greedy, _, _ = await answer_of(session, work(20))
        for sampling in (
            Sampling(temperature=0.0, top_p=0.0, top_k=0, min_p=0.0),
            Sampling(temperature=1.0, top_p=0.0),
        ):
            assert (await answer_of(session, work(20, sampling=sampling)))[0] == greedy

    engine.run(body)


def test_a_seed_that_sglang_would_ignore_is_refused(engine: Engines) -> None:
    async def body(session: Session) -> None:
        with pytest.raises(Unsupported, match="enable-deterministic-inference"):
            session.engine.submit(work(4, sampling=Sampling(temperature=1.0, seed=7)))
        await answer_of(session, work(4, sampling=Sampling(temperature=0.0, seed=7)))

    engine.run(body)


def test_a_greater_priority_goes_first(engine: Engines) -> None:
    async def order_of(session: Session, priorities: tuple[int, ...]) -> list[int]:
        """Return the order in which requests end that come while the engine is full; empty if it was not."""
        filling = [work(1500) for _ in range(session.info.max_running)]
        await asyncio.gather(*(session.engine.submit(each).read() for each in filling))
        order: list[int] = []

        async def wait(priority: int, stream: Stream) -> None:
            await read_to_the_end(stream)
            order.append(priority)

        async with asyncio.TaskGroup() as group:
            for priority, stream in [(each, session.engine.submit(work(4, priority=each))) for each in priorities]:
                group.create_task(wait(priority, stream))
            await eventually(lambda: bool(order), 60)
            was_full = session.busy() == len(filling) + len(priorities) - len(order)
            for each in filling:
                await session.engine.abort(each.request_id)
        return order if was_full else []

    async def body(session: Session) -> None:
        for _ in range(5):  # on a busy machine the engine may be done before the others arrive
            if order := await order_of(session, (1, 2, 50)):
                break
        assert order[:1] == [50]

    engine.run(body)


def test_blocks_of_one_content_have_one_name_and_salt_tells_apart(engine: Engines) -> None:
    async def body(session: Session) -> None:
        size = session.info.block_size
        prompt = tuple(100 + number % 90 for number in range(4 * size))
        before = len(kv_events(session))

        def stored() -> list[KvStored]:
            return [event for event in kv_events(session)[before:] if isinstance(event, KvStored)]

        def first(salt: str | None) -> KvStored | None:
            roots = (event for event in stored() if event.parent_hash is None and event.cache_salt == salt)
            return next((event for event in roots if event.token_ids[:size] == prompt[:size]), None)

        await answer_of(session, work(2, prompt=prompt))
        await eventually(lambda: first(None) is not None)
        plain = first(None)
        assert plain is not None
        assert plain.block_hashes[:1] == NAMES, "they are the same in every process"
        await answer_of(session, work(2, prompt=prompt, cache_salt="tenant"))
        await eventually(lambda: first("tenant") is not None)
        salted = first("tenant")
        assert salted is not None
        assert not set(salted.block_hashes) & set(plain.block_hashes)

    engine.run(body)


def test_prompts_are_reused_and_say_so(engine: Engines) -> None:
    async def body(session: Session) -> None:
        prompt = tuple(7 + number % 70 for number in range(64))
        await answer_of(session, work(2, prompt=prompt))
        _, end, _ = await answer_of(session, work(2, prompt=prompt))
        assert end.cached_tokens == 48, "all but the block that the last token is in"
        _, end, _ = await answer_of(session, work(2, prompt=prompt, cache_salt="other"))
        assert end.cached_tokens == 0

    engine.run(body)
