"""What the engine suites share: the methods that an engine author overrides, and how a test runs."""

import random
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar

import pytest

from baton.errors import Cancelled
from baton.ports.engine import EngineInfo, GenerateEngine, Stream, Work
from baton.protocol.ids import new_request_id
from baton.protocol.requests import OutputOptions, Sampling, StopConditions
from baton.testing.engine_session import Session, read_to_the_end
from baton.testing.shared_engine import SharedEngines, started


class EngineSuite:
    """The base of the engine suites. The tests of a class share started engines; each has a time limit of its own."""

    limit_s = 30.0
    """Time limit of one test, including start and stop of the engine."""

    long_tokens = 3000
    """Tokens that keep a request running while a test acts on it. `max_running` such requests must fit the KV cache."""

    deterministic = True
    """Whether a prompt gives the same tokens at temperature 0, alone and in a batch."""

    lag_limit_s = 2.0
    """How long the engine may block the event loop. Generous, so that only a blocked loop fails."""

    salt: str = ""
    """Makes the prompts of one test different from those of the others, whose prefixes a shared engine has cached."""

    engines: ClassVar[SharedEngines]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def shared_engines(cls) -> Iterator[None]:
        """Share engines among the tests of the class."""
        cls.engines = SharedEngines()
        yield
        cls.engines.close(cls.limit_s)

    @pytest.fixture(autouse=True)
    def salted_prompts(self, request: pytest.FixtureRequest) -> None:
        """Give the test prompts of its own."""
        self.salt = request.node.name

    def make_engine(self) -> GenerateEngine:
        """Return an engine that has not been started, with a small `max_running`, so that requests wait."""
        raise NotImplementedError("an engine's contract test overrides make_engine")

    def make_broken_engine(self) -> GenerateEngine | None:
        """Return an engine whose `start` raises ConfigError or EngineDead, or None to skip that rule."""
        return None

    def prompt(self, seed: int, length: int) -> tuple[int, ...]:
        """Return a prompt of `length` tokens; prompts of one seed share their prefix."""
        numbers = random.Random(f"{self.salt} {seed}")
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
        self.engines.run(body, self.limit_s)

    def _session(self) -> AbstractAsyncContextManager[Session]:
        """A started engine that other tests use too. The test leaves it idle."""
        return self.engines.session("engine", self.make_engine, self.limit_s)

    def _own_session(self) -> AbstractAsyncContextManager[Session]:
        """A started engine that the test may stop."""
        return started(self.make_engine())

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
