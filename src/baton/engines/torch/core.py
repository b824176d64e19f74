"""Everything that happens on the engine's own thread: requests in, steps, outputs out. Knows no event loop."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from baton.config.engines import TorchOptions
from baton.engines.torch.blocks import BlockPool
from baton.engines.torch.commands import Controls
from baton.engines.torch.handoff import newly_final, to_be_filled
from baton.engines.torch.runner import Runner
from baton.engines.torch.sampler import Sampled
from baton.engines.torch.sampling_params import finish_of
from baton.engines.torch.scheduler import Batch, Chunk, Scheduler
from baton.engines.torch.sequence import Phase, Sequence
from baton.errors import BatonError, EngineDead, EngineFailed
from baton.protocol.commands import Command, Outcome
from baton.protocol.events import KvEvent, LoadSnapshot
from baton.protocol.ids import RequestId
from baton.protocol.outputs import Finished, FinishReason, KvComputed, KvWanted, Logprobs

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3


class Made(NamedTuple):
    """One token of one choice, and the end of that choice if this was its last."""

    request_id: RequestId
    choice: int
    token: int
    logprobs: Logprobs | None
    finished: Finished | None


class Failed(NamedTuple):
    """A request that ended without an answer."""

    request_id: RequestId
    error: BatonError


class HandedOver(NamedTuple):
    """Blocks of a request that others may read, or are to write."""

    request_id: RequestId
    blocks: KvComputed | KvWanted


class News(NamedTuple):
    """What the event loop must know."""

    handed_over: list[HandedOver]
    made: list[Made]
    failed: list[Failed]
    events: list[KvEvent]
    load: LoadSnapshot


class Core:
    """The model, the scheduler and the requests between them: a Stepper (see `thread.py`)."""

    def __init__(self, runner: Runner, options: TorchOptions) -> None:
        self.runner = runner
        pool = BlockPool(runner.blocks, options.block_size)
        budget = _step_tokens(options, runner.device.type)
        self.scheduler = Scheduler(pool, options.max_running, budget, options.prefix_cache)
        self.steps = 0
        self.running = 0
        self._controls = Controls(self)
        self._handed_over: list[HandedOver] = []
        self._made: list[Made] = []
        self._failed: list[Failed] = []
        self._told: LoadSnapshot | None = None
        self._failed_steps = 0
        self._requests: dict[RequestId, list[Sequence]] = {}

    @property
    def busy(self) -> bool:
        """Whether there is a step to make."""
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.waiting) and not (scheduler.blocked or self._controls.paused)

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """Every request that has not ended; one that is only lent has."""
        return tuple(name for name, choices in self._requests.items() if choices[0].phase is not Phase.LENT)

    def add(self, choices: list[Sequence]) -> None:
        """Take a request in. Its other choices follow when the first has computed the prompt that they share."""
        self._requests[choices[0].work.request_id] = choices
        self.scheduler.add(choices[0])

    def received(self, request_id: RequestId) -> None:
        """Go on with a request whose KV has come; nothing, if it does not wait for any."""
        if choices := self._requests.get(request_id):
            self.scheduler.received(choices[0])

    def abort(self, request_id: RequestId) -> bool:
        """Forget a request and free all it holds; return whether it was there."""
        choices = self._requests.pop(request_id, None)
        for sequence in choices or ():
            self.scheduler.end(sequence)
        return choices is not None

    def step(self) -> None:
        """Compute one batch. A failure ends the requests in it and no others; failing again and again is fatal."""
        batch = self.scheduler.schedule()
        self.steps += 1
        self._tell_wanted()
        if self.scheduler.blocked:
            return
        try:
            sampled = self.runner.run(batch)
        except Exception as error:
            log.exception("a step failed")
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise EngineDead(f"{MAX_FAILED_STEPS} steps in a row failed, the last with: {error}") from error
            self._fail_batch(batch, EngineFailed(f"the step failed: {error}"))
            return
        self._failed_steps = 0
        for chunk in (*batch.prefills, *batch.decodes):
            self.scheduler.computed(chunk)
            self._start_siblings(chunk)
            if chunk.sequence.produces:
                self._tell_computed(chunk.sequence)
        for sequence, result in sampled:
            if isinstance(result, BatonError):
                self.fail(sequence.work.request_id, result)
            elif sequence.phase is not Phase.ENDED:
                self._append(sequence, result)
        self._controls.after_step()

    def tick(self) -> None:
        """See `Stepper.tick`: an engine that is paused or waits for KV is not stuck."""
        self.steps += 1

    def close(self) -> None:
        """See `Stepper.close`."""
        self._controls.close()

    def prepare(self, command: Command) -> Callable[[], Outcome]:
        """See `Controls.prepare`; the one thing here that another thread may call."""
        return self._controls.prepare(command)

    def fail(self, request_id: RequestId, error: BatonError) -> None:
        """End a request with an error. What others read or write stays as it is until it is aborted."""
        if request_id not in self._requests:
            return
        first, *siblings = self._requests[request_id]
        if first.phase is Phase.LENT:
            return
        if first.told or first.phase is Phase.RECEIVING:
            self.scheduler.lend(first)
            for sibling in siblings:
                self.scheduler.end(sibling)
        else:
            self.abort(request_id)
        self._failed.append(Failed(request_id, error))

    def load(self) -> LoadSnapshot:
        """Tell how busy the engine is now."""
        pool = self.scheduler.pool
        waiting = len(self._requests) - len(self.scheduler.lent) - self.running
        return LoadSnapshot(self.running, waiting, pool.used, pool.total)

    def take_news(self) -> News | None:
        """See `Stepper.take_news`."""
        self.running = len({sequence.work.request_id for sequence in self.scheduler.running})
        load, pool = self.load(), self.scheduler.pool
        if not (self._made or self._handed_over or self._failed or pool.events) and load == self._told:
            return None
        news = News(self._handed_over, self._made, self._failed, pool.events, load)
        self._handed_over, self._made, self._failed, pool.events, self._told = [], [], [], [], load
        return news

    def _tell_wanted(self) -> None:
        if self.scheduler.wanting:
            size = self.scheduler.pool.size
            for sequence in self.scheduler.wanting:
                self._handed_over.append(HandedOver(sequence.work.request_id, to_be_filled(sequence, size)))
            self.scheduler.wanting = []

    def _tell_computed(self, sequence: Sequence) -> None:
        computed = newly_final(sequence, self.scheduler.pool.size)
        if computed is not None:
            self.runner.settle()
            self._handed_over.append(HandedOver(sequence.work.request_id, computed))

    def _start_siblings(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        if sequence.index == 0 and sequence.computed >= sequence.prompt_length:
            for sibling in self._requests[sequence.work.request_id][1:]:
                if sibling.phase is Phase.HELD:
                    self.scheduler.add(sibling)

    def _append(self, sequence: Sequence, sampled: Sampled) -> None:
        sequence.tokens.append(sampled.token)
        end = finish_of(sequence.plan, sampled.token, sequence.generated)
        if end is None and sequence.guide is not None and sequence.guide.done:
            end = (FinishReason.STOP, None)
        request_id = sequence.work.request_id
        finished = None
        if end is not None:
            if sequence.told:
                self.scheduler.lend(sequence)
            else:
                self.scheduler.end(sequence)
            finished = self._finished(sequence, *end)
        self._made.append(Made(request_id, sequence.index, sampled.token, sampled.logprobs, finished))

    def _finished(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None) -> Finished:
        choices = self._requests[sequence.work.request_id]
        if all(choice.phase is Phase.ENDED for choice in choices):
            del self._requests[sequence.work.request_id]
        prompt = _joined(sequence.prompt_logprobs) if sequence.plan.prompt_logprobs is not None else None
        # The later choices share the prompt of the first; what was cached for the request is what it found.
        return Finished(
            reason, sequence.index, stop_reason, choices[0].cached_tokens, None if sequence.index else prompt
        )

    def _fail_batch(self, batch: Batch, error: EngineFailed) -> None:
        for chunk in (*batch.prefills, *batch.decodes):
            self.fail(chunk.sequence.work.request_id, error)


def _joined(parts: list[Logprobs]) -> Logprobs:
    chosen = tuple(value for part in parts for value in part.chosen)
    return Logprobs(chosen, tuple(position for part in parts for position in part.top))


def _step_tokens(options: TorchOptions, device: str) -> int:
    """Return the token budget of one step.

    A long step delays every sequence that decodes beside it. A CPU is as fast with short steps; a GPU is not.
    """
    return options.batch_tokens or (256 if device == "cpu" else 2048)
