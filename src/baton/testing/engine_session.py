"""A started engine with its readings, and the outputs of its streams, for the engine contract."""

from baton.ports.engine import EngineInfo, GenerateEngine, KvImportEngine, Stream
from baton.protocol.events import LoadSnapshot, Reading
from baton.protocol.outputs import Finished, Logprobs, Output, PromptCached, PromptScored, TokenDelta
from baton.testing.bounded import eventually


class Answer:
    """The outputs of one stream, checked while they are read."""

    def __init__(self, choices: int = 1) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(choices)]
        self.ends: list[Finished | None] = [None] * choices
        self.cached: int | None = None
        self.prompt_logprobs: Logprobs | None = None
        self.reads = 0

    def add(self, outputs: list[Output]) -> None:
        """Add the outputs of one read."""
        self.reads += 1
        deltas = [output for output in outputs if isinstance(output, TokenDelta)]
        assert len({delta.index for delta in deltas}) == len(deltas), "one read has at most one delta for each choice"
        for output in outputs:
            match output:
                case PromptCached() | PromptScored():
                    self._add_prompt(output)
                case TokenDelta():
                    self._add_delta(output)
                case Finished():
                    assert self.ends[output.index] is None, "a choice ends once"
                    self.ends[output.index] = output

    def _add_prompt(self, output: PromptCached | PromptScored) -> None:
        if isinstance(output, PromptCached):
            assert (self.cached, any(self.tokens)) == (None, False), "once, with the first tokens"
            self.cached = output.tokens
        else:
            assert (self.prompt_logprobs, self.tokens[0]) == (None, []), "once, with the first tokens"
            self.prompt_logprobs = output.logprobs

    def _add_delta(self, delta: TokenDelta) -> None:
        assert delta.token_ids, "a delta has tokens"
        assert self.ends[delta.index] is None, "no tokens after the end of a choice"
        if delta.logprobs is not None:
            assert len(delta.logprobs.chosen) == len(delta.token_ids), "one logprob for each token"
        self.tokens[delta.index] += delta.token_ids


class Session:
    """A started engine and its readings."""

    def __init__(self, engine: GenerateEngine, info: EngineInfo) -> None:
        self.engine = engine
        self.info = info
        self.readings: list[Reading] = []
        self.blocks_at_start: int | None = None

    @property
    def kv_import(self) -> KvImportEngine:
        """The engine, as one that continues from KV written into its cache."""
        assert isinstance(self.engine, KvImportEngine)
        return self.engine

    async def listen(self) -> None:
        """Keep every reading, until the engine stops."""
        async for reading in self.engine.readings():
            self.readings.append(reading)
            if isinstance(reading, LoadSnapshot) and self.blocks_at_start is None:
                self.blocks_at_start = reading.used_blocks

    def used_blocks(self) -> int | None:
        """The blocks that requests hold, by the last load reading."""
        return next((r.used_blocks for r in reversed(self.readings) if isinstance(r, LoadSnapshot)), None)

    def busy(self) -> int:
        """How many requests run or wait."""
        progress = self.engine.progress()
        return progress.running + progress.waiting

    async def as_at_the_start(self, limit_s: float) -> None:
        """Wait until no request runs or waits, and as few blocks are held as at the start."""
        await eventually(lambda: not self.busy() and self.used_blocks() == self.blocks_at_start, limit_s)


async def read_to_the_end(stream: Stream, choices: int = 1, not_before: float = 0.0) -> Answer:
    """Read `stream` to its end. Raises what it failed with."""
    answer = Answer(choices)
    while outputs := await stream.read(not_before):
        answer.add(outputs)
    return answer
