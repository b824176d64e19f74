"""Core with a runner that fails on demand."""

from types import SimpleNamespace
from typing import cast

import pytest

from baton.config.engines import TorchOptions
from baton.engines.torch.blocks import BlockPool
from baton.engines.torch.core import MAX_FAILED_STEPS, Core
from baton.engines.torch.pending import ComputedStep, PendingStep
from baton.engines.torch.runner import Runner
from baton.engines.torch.sampling.sampler import Sampled
from baton.engines.torch.sampling_params import make_sampling_params
from baton.engines.torch.scheduler import Batch, Scheduler
from baton.engines.torch.sequence import Sequence
from baton.errors import BatonError, EngineDead, EngineFailed
from baton.models.defaults import SamplingDefaults
from baton.ports.engine import Work
from baton.protocol.handoff import Bootstrap, Consume, Handoff, Produce
from baton.protocol.ids import RequestId
from baton.protocol.outputs import KvComputed, KvWanted

CONSUME = Consume(source=Bootstrap(host="elsewhere", port=1, room=1))


class PlannedRunner:
    """Samples token 7 for every sequence, or fails as configured."""

    def __init__(self) -> None:
        self.blocks = 32
        self.block = 4
        self.config = SimpleNamespace(diffusion=None)
        self.device = SimpleNamespace(type="cpu")
        self.weights_arena = self.kv_arena = SimpleNamespace(released=False)
        self.experts = self.slots = None
        self.failing = False
        self.settled = 0
        self.errors: dict[str, BatonError] = {}

    def settle(self) -> None:
        self.settled += 1

    overlaps = False

    def start(self, batch: Batch) -> PendingStep:
        if self.failing:
            raise RuntimeError("broken on purpose")
        chunks = [chunk for chunk in (*batch.prefills, *batch.decodes) if chunk.last]
        return ComputedStep(
            [(chunk.sequence, self.errors.get(chunk.sequence.work.request_id) or Sampled(7, None)) for chunk in chunks]
        )


def make_core() -> tuple[Core, PlannedRunner]:
    runner = PlannedRunner()
    return Core(cast(Runner, runner), TorchOptions(block_size=4, max_running=4)), runner


def request(
    name: str, tokens: int = 3, choices: int = 1, handoff: Handoff | None = None, first: int = 1
) -> list[Sequence]:
    work = Work(request_id=RequestId(name), token_ids=(first, 2, 3, 4, 5), max_tokens=tokens, handoff=handoff)
    plan = make_sampling_params(work, SamplingDefaults(), 100)
    return [Sequence(work, index, plan, 0) for index in range(choices)]


def finish(core: Core) -> list[str]:
    """Step to the end; return how each request ended."""
    ends = []
    while core.busy:
        core.step()
        result = core.take_result()
        if result is not None:
            ends += [f"{one.request_id}.{one.choice} {one.finished.reason}" for one in result.sampled if one.finished]
            ends += [f"{failed.request_id} {failed.error.code}" for failed in result.failed]
    assert core.scheduler.pool.used == 0
    return ends


def test_a_step_that_fails_ends_the_requests_in_it_and_no_others() -> None:
    core, runner = make_core()
    core.add(request("a"))
    runner.failing = True
    core.step()
    runner.failing = False
    core.add(request("b"))
    assert finish(core) == ["a engine_failed", "b.0 length"]


def test_too_many_failed_steps_in_a_row_are_fatal() -> None:
    core, runner = make_core()
    runner.failing = True
    for number in range(MAX_FAILED_STEPS - 1):
        core.add(request(f"r{number}"))
        core.step()
    core.add(request("last"))
    with pytest.raises(EngineDead, match="broken on purpose"):
        core.step()


def test_a_successful_step_resets_the_count_of_failed_steps() -> None:
    core, runner = make_core()
    for number in range(2 * MAX_FAILED_STEPS):
        core.add(request(f"bad{number}"))
        runner.failing = True
        core.step()
        runner.failing = False
        core.add(request(f"good{number}"))
        finish(core)


def test_a_token_that_cannot_be_sampled_ends_every_choice_of_its_request_only() -> None:
    core, runner = make_core()
    runner.errors["a"] = EngineFailed("no numbers")
    core.add(request("a", choices=3))
    core.add(request("b"))
    assert finish(core) == ["a engine_failed", "b.0 length"]


def test_later_choices_start_when_the_first_has_computed_the_prompt() -> None:
    core, _ = make_core()
    choices = request("a", choices=3)
    core.add(choices)
    core.step()
    assert [choice.computed for choice in choices] == [5, 0, 0]
    core.step()
    assert [choice.computed for choice in choices] == [6, 5, 5]
    assert choices[0].blocks[0] == choices[1].blocks[0] == choices[2].blocks[0]
    assert sorted(finish(core)) == ["a.0 length", "a.1 length", "a.2 length"]


def test_an_aborted_request_frees_every_choice() -> None:
    core, _ = make_core()
    core.add(request("a", tokens=10, choices=3))
    core.step()
    core.step()
    assert core.abort(RequestId("a"))
    assert not core.abort(RequestId("a"))
    assert finish(core) == []
    assert core.load().running == core.load().waiting == 0


def test_an_offered_request_has_ended_and_keeps_its_blocks_until_it_is_aborted() -> None:
    core, runner = make_core()
    (sequence,) = request("a", tokens=1, handoff=Produce())
    core.add([sequence])
    core.step()
    assert runner.settled == 1, "offered KV is in memory"
    result = core.take_result()
    assert result is not None
    assert result.handoff_blocks == [("a", KvComputed(tuple(sequence.blocks), complete=True))]
    assert [sampled.finished is not None for sampled in result.sampled] == [True]
    assert not core.busy
    assert (result.load.running, result.load.waiting, result.load.used_blocks) == (0, 0, 2)
    assert core.requests == ()
    assert core.abort(RequestId("a"))
    assert not core.abort(RequestId("a"))
    assert core.load().used_blocks == 0


def test_a_request_that_waits_for_kv_needs_no_step_and_its_choices_follow() -> None:
    core, _ = make_core()
    choices = request("a", choices=3, handoff=CONSUME)
    core.add(choices)
    core.step()
    result = core.take_result()
    assert result is not None
    assert result.handoff_blocks == [("a", KvWanted(0, tuple(choices[0].blocks)))]
    assert (result.load.running, result.load.waiting) == (0, 1)
    assert not core.busy
    core.received(RequestId("unknown"))
    assert not core.busy
    core.received(RequestId("a"))
    assert core.busy
    assert sorted(finish(core)) == ["a.0 length", "a.1 length", "a.2 length"]


def test_a_queue_that_waits_for_offered_blocks_is_scheduled_after_a_change_only() -> None:
    core, runner = make_core()
    for number in range(runner.blocks // 2):
        core.add(request(f"offered{number}", tokens=1, handoff=Produce(), first=10 + number))
        core.step()
    core.add(request("a"))
    core.step()
    assert not core.busy
    core.add(request("b"))
    assert core.busy
    core.step()
    assert not core.busy
    assert core.load().waiting == 2
    core.abort(RequestId("offered0"))
    assert core.busy
    core.step()
    assert core.load().used_blocks == runner.blocks
    for number in range(runner.blocks // 2):
        core.abort(RequestId(f"offered{number}"))
    assert finish(core)[-2:] == ["a.0 length", "b.0 length"]


@pytest.mark.parametrize("handoff", [Produce(), CONSUME], ids=["read", "written"])
def test_blocks_in_a_handoff_stay_after_a_failure_until_the_request_is_aborted(handoff: Handoff) -> None:
    core, runner = make_core()
    runner.errors["a"] = EngineFailed("no numbers")
    core.add(request("a", tokens=1, handoff=handoff))
    core.step()
    for _ in range(2):
        core.fail(RequestId("a"), EngineFailed("for another reason"))
    core.received(RequestId("a"))
    assert not core.busy
    result = core.take_result()
    assert result is not None
    assert [failed.request_id for failed in result.failed] == ["a"]
    assert (result.load.running, result.load.waiting, result.load.used_blocks) == (0, 0, 2)
    core.abort(RequestId("a"))
    assert core.load().used_blocks == 0


def test_a_failed_step_keeps_blocks_that_were_offered_before_it() -> None:
    core, runner = make_core()
    core.scheduler = Scheduler(BlockPool(32, 4), max_running=1, batch_tokens=4)
    core.add(request("a", tokens=1, handoff=Produce()))
    core.step()
    runner.failing = True
    core.step()
    assert core.load().used_blocks == 2
    core.abort(RequestId("a"))
    assert core.load().used_blocks == 0
