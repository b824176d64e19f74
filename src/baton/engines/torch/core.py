"""What runs on the engine's thread: requests in, steps, results out. Knows no event loop."""

import logging
from collections.abc import Callable
from time import perf_counter_ns
from typing import Literal, NamedTuple

from baton.config.engines import TorchOptions
from baton.engine_kit.output_stream import join_logprobs
from baton.engines.torch.blocks import BlockPool
from baton.engines.torch.capacity import with_device_defaults
from baton.engines.torch.commands import CommandExecutor
from baton.engines.torch.diffusion.candidates import Decided
from baton.engines.torch.experts.batch_rows import batch_rows
from baton.engines.torch.experts.pass_counter import PassCounter
from baton.engines.torch.experts.record_commands import RecordCommands
from baton.engines.torch.pending import PendingStep, Sampling
from baton.engines.torch.runner import Runner
from baton.engines.torch.sampling.sampler import Sampled
from baton.engines.torch.sampling_params import finish_of
from baton.engines.torch.scheduler import Batch, Chunk, Scheduler
from baton.engines.torch.sequence import Phase, Sequence
from baton.errors import BatonError, EngineDead, EngineFailed, PeerLost
from baton.protocol.commands import Command, JoinGroup, Outcome, UpdateWeights
from baton.protocol.events import KvEvent, LoadSnapshot
from baton.protocol.ids import RequestId
from baton.protocol.outputs import Finished, FinishReason, KvComputed, KvWanted, Logprobs, PromptProgress

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


class RequestProgress(NamedTuple):
    """What was done with the prompt of a request."""

    request_id: RequestId
    progress: PromptProgress


class StepResult(NamedTuple):
    """What the event loop receives after a step, or after requests and commands between two steps."""

    progress: list[RequestProgress]
    handoff_blocks: list[HandoffBlocks]
    sampled: list[SampledToken]
    failed: list[FailedRequest]
    kv_events: list[KvEvent]
    load: LoadSnapshot


class _Flight(NamedTuple):
    """A started step, or why it could not be started."""

    batch: Batch
    step: PendingStep | None
    error: Exception | None = None

    def wait(self) -> Sampling:
        """Return what the step has sampled. Raises why it could not be started, or what it raises."""
        if self.step is None:
            raise self.error or RuntimeError("the step was not started")
        return self.step.wait()


class Core:
    """The model, the scheduler and the requests between them: a Stepper (see `thread.py`).

    On a GPU a step is started before the tokens of the one before are read, where those can only end sequences:

        GPU    | step 1           | step 2           | step 3          |
        host   | start 2 | wait 1 ... read 1, start 3 | wait 2 ... read 2, start 4

    What is sampled for a sequence that has ended meanwhile is dropped. Blocks that are freed may still be written by
    the step that runs; later steps come after it on the device, and transfers wait for it (`Runner.settle`).
    """

    def __init__(self, runner: Runner, options: TorchOptions) -> None:
        self.runner = runner
        pool = BlockPool(runner.blocks, runner.block)
        options = with_device_defaults(options, runner.device)
        by_block = runner.config.diffusion is not None
        self.scheduler = Scheduler(pool, options.max_running, options.batch_tokens, options.prefix_cache, by_block)
        self.pass_counter = PassCounter(runner.experts, runner.slots) if runner.experts and runner.slots else None
        self.steps = 0
        self.running = 0
        self._commands = CommandExecutor(self)
        self._handoff_blocks: list[HandoffBlocks] = []
        self._progress: list[RequestProgress] = []
        self._step_began_ns = 0
        self._sampled: list[SampledToken] = []
        self._failed: list[FailedRequest] = []
        self._last_load: LoadSnapshot | None = None
        self._failed_steps = 0
        self._requests: dict[RequestId, list[Sequence]] = {}
        self._flight: _Flight | None = None

    @property
    def busy(self) -> bool:
        """Whether a step can be computed, or has been started."""
        scheduler = self.scheduler
        if self._flight is not None:
            return True
        return bool(scheduler.running or scheduler.waiting) and not (scheduler.blocked or self._commands.halted)

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """Every request that has not ended; one whose blocks are only offered has."""
        return tuple(name for name, choices in self._requests.items() if choices[0].phase is not Phase.OFFERED)

    def add(self, choices: list[Sequence]) -> None:
        """Queue a request. Its other choices follow when the first has computed the prompt that they share."""
        self._requests[choices[0].work.request_id] = choices
        self._report_progress(choices[0], "queued")
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
        flight = self._flight or self._start()
        self._flight = None
        if flight is not None:
            self._flight = self._start_next(flight)
            self._finish_step(flight)

    def drain(self) -> None:
        """Finish a step that has been started, so that memory and weights can change."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._finish_step(flight)

    def _start(self) -> _Flight | None:
        """Start the next batch; None if there is nothing to compute."""
        self._step_began_ns = perf_counter_ns()
        batch = self.scheduler.schedule()
        self.steps += 1
        if self.scheduler.wanting:
            self._report_wanted()
        if self.scheduler.lost:
            self._fail_lost()
        if self.scheduler.blocked:
            return None
        self.runner.records_routing = self.pass_counter is not None and self.pass_counter.wants()
        try:
            return _Flight(batch, self.runner.start(batch))
        except Exception as error:  # noqa: BLE001 - ends the requests of the step
            return _Flight(batch, None, error)

    def _start_next(self, flight: _Flight) -> _Flight | None:
        """Start the step after `flight`, if it does not depend on what that samples."""
        if flight.step is None or not flight.step.sampled_on_device or not self.runner.overlaps:
            return None
        if self.pass_counter is not None and self.pass_counter.used:
            return None
        decodes = self.scheduler.next_decodes(flight.batch)
        if not decodes:
            return None
        self.steps += 1
        batch = Batch([], decodes)
        try:
            return _Flight(batch, self.runner.start_next(decodes))
        except Exception as error:  # noqa: BLE001 - ends the requests of the step
            return _Flight(batch, None, error)

    def _finish_step(self, flight: _Flight) -> None:
        """Wait for a step, and add what it has computed and sampled to its sequences."""
        self.scheduler.hash_blocks(flight.batch)  # while a GPU computes
        try:
            results = dict(flight.wait())
        except Exception as error:
            log.exception("a step failed")
            self._fail_batch(flight.batch, error)
            return
        batch = flight.batch
        self._failed_steps = 0
        self._account_experts(batch)
        prefills = [chunk for chunk in batch.prefills if _is_current(chunk)]
        current = [*prefills, *(chunk for chunk in batch.decodes if _is_current(chunk))]
        self._report_prefills(prefills)
        for chunk in current:
            self._record_computed(chunk, chunk.sequence in results)
        for chunk in current:
            if (result := results.get(chunk.sequence)) is not None:
                self._add_result(chunk.sequence, result)
        self._commands.after_step()

    def _record_computed(self, chunk: Chunk, has_result: bool) -> None:
        if chunk.last and not has_result:
            chunk = Chunk(chunk.sequence, chunk.start, chunk.length - 1)  # its last row is repeated in the next step
        self.scheduler.computed(chunk)
        self._start_siblings(chunk)
        if chunk.sequence.produces:
            self._report_computed(chunk.sequence)

    def _add_result(self, sequence: Sequence, result: Sampled | Decided | BatonError) -> None:
        if isinstance(result, BatonError):
            self.fail(sequence.work.request_id, result)
        elif sequence.phase is not Phase.ENDED:
            self._extend(sequence, result)

    def tick(self) -> None:
        """See `Stepper.tick`: an engine that is paused or waits for KV is not stuck."""
        self.steps += 1

    def close(self) -> None:
        """See `Stepper.close`."""
        self._flight = None
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
        news = self._sampled or self._handoff_blocks or self._failed or self._progress or pool.events
        if not news and load == self._last_load:
            return None
        result = StepResult(self._progress, self._handoff_blocks, self._sampled, self._failed, pool.events, load)
        self._progress = []
        self._handoff_blocks, self._sampled, self._failed, pool.events, self._last_load = [], [], [], [], load
        return result

    def _account_experts(self, batch: Batch) -> None:
        """Count the experts that a step has used, before its tokens are added; experts may move then."""
        if self.pass_counter is not None:
            routing = self.runner.routing
            self.pass_counter.after_pass(routing.slots if routing is not None else None, lambda: batch_rows(batch))

    def _report_prefills(self, chunks: list[Chunk]) -> None:
        """Other choices share the prompt of the first; what they compute is not reported."""
        for chunk in chunks:
            if chunk.sequence.index == 0:
                self._report_first_step(chunk.sequence)
                stop = min(
                    chunk.start + chunk.length, chunk.sequence.prompt_length
                )  # blocks of a diffusion model go on
                self._report_progress(chunk.sequence, "prefill_chunk", max(0, stop - chunk.start))

    def _report_first_step(self, sequence: Sequence) -> None:
        if not sequence.stepped:
            sequence.stepped = True
            progress = PromptProgress(self._step_began_ns, "first_step")
            self._progress.append(RequestProgress(sequence.work.request_id, progress))

    def _report_progress(self, sequence: Sequence, phase: Literal["queued", "prefill_chunk"], tokens: int = 0) -> None:
        progress = PromptProgress(perf_counter_ns(), phase, tokens)
        self._progress.append(RequestProgress(sequence.work.request_id, progress))

    def _report_wanted(self) -> None:
        self.runner.settle()  # steps of sequences that have ended may still write to these blocks
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
        if is_first:
            self._report_first_step(sequence)
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


def _is_current(chunk: Chunk) -> bool:
    """Whether a sequence is still where a step has computed it."""
    return chunk.sequence.phase is Phase.RUNNING and chunk.start + chunk.length <= chunk.sequence.end


def _prompt_logprobs(sequence: Sequence) -> Logprobs | None:
    if sequence.params.prompt_logprobs is None:
        return None
    parts, sequence.prompt_logprobs = sequence.prompt_logprobs, []
    return join_logprobs(parts)
