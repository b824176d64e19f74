"""What runs on the engine's thread: requests in, steps, results out. Knows no event loop."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from baton.config.engines import TorchOptions
from baton.engine_kit.output_stream import join_logprobs
from baton.engines.torch.blocks import BlockPool
from baton.engines.torch.commands import CommandExecutor
from baton.engines.torch.diffusion.candidates import Decided
from baton.engines.torch.experts.batch_rows import batch_rows
from baton.engines.torch.experts.pass_counter import PassCounter
from baton.engines.torch.experts.record_commands import RecordCommands
from baton.engines.torch.runner import Runner, Sampling
from baton.engines.torch.sampler import Sampled
from baton.engines.torch.sampling_params import finish_of
from baton.engines.torch.scheduler import Batch, Chunk, Scheduler
from baton.engines.torch.sequence import Phase, Sequence
from baton.errors import BatonError, EngineDead, EngineFailed, PeerLost
from baton.protocol.commands import Command, JoinGroup, Outcome, UpdateWeights
from baton.protocol.events import KvEvent, LoadSnapshot
from baton.protocol.ids import RequestId
from baton.protocol.outputs import Finished, FinishReason, KvComputed, KvWanted, Logprobs

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3


class SampledToken(NamedTuple):
    """One token of one choice, and the end of that choice if this was its last.

    The first token of a request has its `cached_tokens` and the log-probabilities of its prompt, if it wants them.
    """

    request_id: RequestId
    choice: int
    token: int
    logprobs: Logprobs | None
    finished: Finished | None
    cached_tokens: int | None
    prompt_logprobs: Logprobs | None


class FailedRequest(NamedTuple):
    """A request that ended with an error."""

    request_id: RequestId
    error: BatonError


class HandoffBlocks(NamedTuple):
    """Blocks of a request that a transfer may read, or has to write."""

    request_id: RequestId
    blocks: KvComputed | KvWanted


class StepResult(NamedTuple):
    """What the event loop receives after a step, or after requests and commands between two steps."""

    handoff_blocks: list[HandoffBlocks]
    sampled: list[SampledToken]
    failed: list[FailedRequest]
    kv_events: list[KvEvent]
    load: LoadSnapshot


class Core:
    """The model, the scheduler and the requests between them: a Stepper (see `thread.py`)."""

    def __init__(self, runner: Runner, options: TorchOptions) -> None:
        self.runner = runner
        pool = BlockPool(runner.blocks, runner.block)
        budget = _step_tokens(options, runner.device.type)
        by_block = runner.config.diffusion is not None
        self.scheduler = Scheduler(pool, options.max_running, budget, options.prefix_cache, by_block)
        self.pass_counter = PassCounter(runner.experts, runner.slots) if runner.experts and runner.slots else None
        self.steps = 0
        self.running = 0
        self._commands = CommandExecutor(self)
        self._handoff_blocks: list[HandoffBlocks] = []
        self._sampled: list[SampledToken] = []
        self._failed: list[FailedRequest] = []
        self._last_load: LoadSnapshot | None = None
        self._failed_steps = 0
        self._requests: dict[RequestId, list[Sequence]] = {}

    @property
    def busy(self) -> bool:
        """Whether a step can be computed."""
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.waiting) and not (scheduler.blocked or self._commands.halted)

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """Every request that has not ended; one whose blocks are only offered has."""
        return tuple(name for name, choices in self._requests.items() if choices[0].phase is not Phase.OFFERED)

    def add(self, choices: list[Sequence]) -> None:
        """Queue a request. Its other choices follow when the first has computed the prompt that they share."""
        self._requests[choices[0].work.request_id] = choices
        self.scheduler.add(choices[0])

    def received(self, request_id: RequestId) -> None:
        """Continue a request whose KV has arrived. Does nothing if it is not waiting for KV."""
        if choices := self._requests.get(request_id):
            self.scheduler.received(choices[0])

    def abort(self, request_id: RequestId) -> bool:
        """Remove a request and free everything it holds; return whether it was known."""
        choices = self._requests.pop(request_id, None)
        for sequence in choices or ():
            self.scheduler.end(sequence)
        return choices is not None

    def step(self) -> None:
        """Compute one batch. A failure ends only the requests in it; several failed steps in a row are fatal."""
        batch = self.scheduler.schedule()
        self.steps += 1
        if self.scheduler.wanting:
            self._report_wanted()
        if self.scheduler.lost:
            self._fail_lost()
        if self.scheduler.blocked:
            return
        try:
            sampled = self._compute(batch)
        except Exception as error:
            log.exception("a step failed")
            self._fail_batch(batch, error)
            return
        self._failed_steps = 0
        self._account_experts(batch)
        for chunk in (*batch.prefills, *batch.decodes):
            self.scheduler.computed(chunk)
            self._start_siblings(chunk)
            if chunk.sequence.produces:
                self._report_computed(chunk.sequence)
        for sequence, result in sampled:
            if isinstance(result, BatonError):
                self.fail(sequence.work.request_id, result)
            elif sequence.phase is not Phase.ENDED:
                self._extend(sequence, result)
        self._commands.after_step()

    def tick(self) -> None:
        """See `Stepper.tick`: an engine that is paused or waits for KV is not stuck."""
        self.steps += 1

    def close(self) -> None:
        """See `Stepper.close`."""
        self._commands.close()

    @property
    def records(self) -> RecordCommands:
        """The commands on records of experts."""
        return self._commands.records

    def prepare(self, command: JoinGroup | UpdateWeights) -> Callable[[], Outcome]:
        """See `CommandExecutor.prepare`; the only method here that another thread may call."""
        return self._commands.prepare(command)

    def execute(self, command: Command) -> Outcome:
        """See `CommandExecutor.execute`."""
        return self._commands.execute(command)

    def fail(self, request_id: RequestId, error: BatonError) -> None:
        """End a request with an error. Blocks that a transfer uses stay as they are until the request is aborted."""
        if request_id not in self._requests:
            return
        first, *siblings = self._requests[request_id]
        if first.phase is Phase.OFFERED:
            return
        if first.offered or first.phase is Phase.RECEIVING:
            self.scheduler.offer(first)
            for sibling in siblings:
                self.scheduler.end(sibling)
        else:
            self.abort(request_id)
        self._failed.append(FailedRequest(request_id, error))

    def load(self) -> LoadSnapshot:
        """Return the current load."""
        pool = self.scheduler.pool
        waiting = len(self._requests) - len(self.scheduler.offered) - self.running
        return LoadSnapshot(self.running, waiting, pool.used, pool.total)

    def take_result(self) -> StepResult | None:
        """See `Stepper.take_result`."""
        self.running = len({sequence.work.request_id for sequence in self.scheduler.running})
        load, pool = self.load(), self.scheduler.pool
        if not (self._sampled or self._handoff_blocks or self._failed or pool.events) and load == self._last_load:
            return None
        result = StepResult(self._handoff_blocks, self._sampled, self._failed, pool.events, load)
        self._handoff_blocks, self._sampled, self._failed, pool.events, self._last_load = [], [], [], [], load
        return result

    def _compute(self, batch: Batch) -> Sampling:
        self.runner.records_routing = self.pass_counter is not None and self.pass_counter.wants()
        return self.runner.run(batch)

    def _account_experts(self, batch: Batch) -> None:
        """Count the experts that a step has used, before its tokens are added; experts may move then."""
        if self.pass_counter is not None:
            routing = self.runner.routing
            self.pass_counter.after_pass(routing.slots if routing is not None else None, lambda: batch_rows(batch))

    def _report_wanted(self) -> None:
        size = self.scheduler.pool.size
        self._handoff_blocks += [
            HandoffBlocks(sequence.work.request_id, sequence.wanted_blocks(size)) for sequence in self.scheduler.wanting
        ]
        self.scheduler.wanting = []

    def _fail_lost(self) -> None:
        lost, self.scheduler.lost = self.scheduler.lost, []
        for sequence in lost:
            self.fail(
                sequence.work.request_id,
                PeerLost("the KV of a prompt with media was evicted, and their rows are not on this worker"),
            )

    def _report_computed(self, sequence: Sequence) -> None:
        computed = sequence.take_computed_blocks(self.scheduler.pool.size)
        if computed is not None:
            self.runner.settle()
            self._handoff_blocks.append(HandoffBlocks(sequence.work.request_id, computed))

    def _start_siblings(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        if sequence.index == 0 and sequence.has_prompt:
            for sibling in self._requests[sequence.work.request_id][1:]:
                if sibling.phase is Phase.HELD:
                    self.scheduler.add(sibling)

    def _extend(self, sequence: Sequence, result: Sampled | Decided) -> None:
        """Add the next token, or set positions of the block that is decoded.

        A block that is complete is delivered, and the next one begins.
        """
        canvas = sequence.canvas
        if isinstance(result, Sampled):
            self._append(sequence, result)
            return
        assert canvas is not None
        canvas.decide(result)
        found = canvas.complete(sequence.params, sequence.generated)
        if found is None:
            return
        for sampled in found:
            self._append(sequence, sampled)
        if sequence.phase is Phase.RUNNING:
            canvas.begin(sequence.tokens)

    def _append(self, sequence: Sequence, sampled: Sampled) -> None:
        sequence.tokens.append(sampled.token)
        end = finish_of(sequence.params, sampled.token, sequence.generated)
        if end is None and sequence.guide is not None and sequence.guide.done:
            end = (FinishReason.STOP, None)
        request_id = sequence.work.request_id
        finished = None
        if end is not None:
            if sequence.offered:
                self.scheduler.offer(sequence)
            else:
                self.scheduler.end(sequence)
            finished = self._finished(sequence, *end)
        is_first = sequence.index == 0 and sequence.generated == 1
        cached = sequence.cached_tokens if is_first else None
        scores = _prompt_logprobs(sequence) if is_first else None
        self._sampled.append(
            SampledToken(request_id, sequence.index, sampled.token, sampled.logprobs, finished, cached, scores)
        )

    def _finished(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None) -> Finished:
        choices = self._requests[sequence.work.request_id]
        if all(choice.phase is Phase.ENDED for choice in choices):
            del self._requests[sequence.work.request_id]
        # Later choices share the prompt of the first, so its cached tokens are those of the request.
        return Finished(reason, sequence.index, stop_reason, choices[0].cached_tokens)

    def _fail_batch(self, batch: Batch, error: Exception) -> None:
        """End the requests of a step that raised `error`. Raises EngineDead after too many such steps in a row."""
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineDead(f"{MAX_FAILED_STEPS} steps in a row failed, the last with: {error}") from error
        failure = EngineFailed(f"the step failed: {error}")
        for chunk in (*batch.prefills, *batch.decodes):
            self.fail(chunk.sequence.work.request_id, failure)


def _prompt_logprobs(sequence: Sequence) -> Logprobs | None:
    if sequence.params.prompt_logprobs is None:
        return None
    parts, sequence.prompt_logprobs = sequence.prompt_logprobs, []
    return join_logprobs(parts)


def _step_tokens(options: TorchOptions, device: str) -> int:
    """Return the token budget of one step.

    A long step delays every sequence that decodes beside it. A CPU is as fast with short steps; a GPU is not.
    """
    return options.batch_tokens or (256 if device == "cpu" else 2048)
