"""What the engine suites share: the methods that an engine author overrides, and how a test runs."""

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.errors import Cancelled
from baton.ports.engine import EngineInfo, GenerateEngine, Stream, Work
from baton.protocol.ids import new_request_id
from baton.protocol.requests import OutputOptions, Sampling, StopConditions
from baton.testing.bounded import eventually, run_bounded
from baton.testing.engine_session import Session, read_to_the_end
from baton.testing.fakes import running


class EngineSuite:
    """The base of the engine suites. Each test has an event loop and a time limit of its own."""

    limit_s = 30.0
    """Time limit of one test, including start and stop of the engine."""

    long_tokens = 3000
    """Tokens that keep a request running while a test acts on it. `max_running` such requests must fit the KV cache."""

    deterministic = True
    """Whether a prompt gives the same tokens at temperature 0, alone and in a batch."""

    lag_limit_s = 2.0
    """How long the engine may block the event loop. Generous, so that only a blocked loop fails."""

    def make_engine(self) -> GenerateEngine:
        """Return an engine that has not been started, with a small `max_running`, so that requests wait."""
        raise NotImplementedError("an engine's contract test overrides make_engine")

    def make_broken_engine(self) -> GenerateEngine | None:
        """Return an engine whose `start` raises ConfigError or EngineDead, or None to skip that rule."""
        return None

    def prompt(self, seed: int, length: int) -> tuple[int, ...]:
        """Return a prompt of `length` tokens; prompts of one seed share their prefix."""
        numbers = random.Random(seed)
        return tuple(numbers.randrange(1, 200) for _ in range(length))

    def impossible(self, info: EngineInfo) -> list[Work]:
        """Return work that passes admission and can never run, because it needs more than the engine has."""
        too_long = info.total_blocks * info.block_size + 1
        return [self.work(info, prompt=self.prompt(0, 1) * too_long)]

    def work(
        self,
        info: EngineInfo,
        seed: int = 0,
        length: int = 24,
        tokens: int = 8,
        choices: int = 1,
        logprobs: int | None = None,
        prompt: tuple[int, ...] | None = None,
    ) -> Work:
        """Return work that generates exactly `tokens` tokens, always the same."""
        return Work(
            request_id=new_request_id("contract"),
            token_ids=self.prompt(seed, length) if prompt is None else prompt,
            max_tokens=tokens,
            stop=StopConditions(max_tokens=tokens, ignore_eos=True),
            sampling=Sampling(n=choices, temperature=0.0),
            output=OutputOptions(logprobs=logprobs),
            eos_token_ids=info.eos_token_ids,
        )

    # Helpers

    def _run(self, body: Coroutine[Any, Any, None]) -> None:
        run_bounded(body, self.limit_s)

    @asynccontextmanager
    async def _session(self, engine: GenerateEngine | None = None) -> AsyncIterator[Session]:
        engine = engine or self.make_engine()
        async with running(engine) as info:
            session = Session(engine, info)
            listening = asyncio.create_task(session.listen())
            await eventually(lambda: session.used_blocks() is not None)
            yield session
        await listening

    def _long(self, session: Session, seed: int = 0) -> Work:
        return self.work(session.info, seed, tokens=self.long_tokens)

    async def _tokens_of(self, session: Session, work: Work) -> list[int]:
        """Return the tokens that `work` generates alone."""
        again = self.work(session.info, tokens=work.max_tokens, prompt=work.token_ids)
        answer = await read_to_the_end(session.engine.submit(again))
        return answer.tokens[0]

    async def _abort(self, session: Session, work: Work, stream: Stream, choices: int = 1) -> None:
        await session.engine.abort(work.request_id)
        for _ in range(2):
            with pytest.raises(Cancelled):
                await read_to_the_end(stream, choices)
