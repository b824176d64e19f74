"""The engine's thread from the inside, with a runner that fails when it is told to."""

from types import SimpleNamespace
from typing import cast

import pytest

from baton.engines.torch.core import MAX_FAILED_STEPS, Core
from baton.engines.torch.options import TorchOptions
from baton.engines.torch.plan import SamplingDefaults, make_plan
from baton.engines.torch.runner import Runner, Sampling
from baton.engines.torch.sampler import Sampled
from baton.engines.torch.scheduler import Batch
from baton.engines.torch.sequence import Sequence
from baton.errors import BatonError, EngineDead, EngineFailed
from baton.ports.engine import Work
from baton.protocol.ids import RequestId


class PlannedRunner:
    """Says token 7 to everybody, but for what it has been told to do."""

    def __init__(self) -> None:
        self.blocks = 32
        self.weights_arena = self.kv_arena = SimpleNamespace(released=False)
        self.failing = False
        self.sick: dict[str, BatonError] = {}

    def run(self, batch: Batch) -> Sampling:
        if self.failing:
            raise RuntimeError("broken on purpose")
        chunks = [chunk for chunk in (*batch.prefills, *batch.decodes) if chunk.last]
        return [(chunk.sequence, self.sick.get(chunk.sequence.work.request_id) or Sampled(7, None)) for chunk in chunks]


def make_core() -> tuple[Core, PlannedRunner]:
    runner = PlannedRunner()
    return Core(cast(Runner, runner), TorchOptions(block=4, max_running=4)), runner


def request(name: str, tokens: int = 3, choices: int = 1) -> list[Sequence]:
    work = Work(request_id=RequestId(name), token_ids=(1, 2, 3, 4, 5), max_tokens=tokens)
    plan = make_plan(work, 0, SamplingDefaults(), 100)
    return [Sequence(work, index, plan, 0) for index in range(choices)]


def finish(core: Core) -> list[str]:
    """Step to the end; return what happened to whom."""
    seen = []
    while core.busy:
        core.step()
        news = core.take_news()
        if news is not None:
            seen += [f"{made.request_id}.{made.choice} {made.finished.reason}" for made in news.made if made.finished]
            seen += [f"{failed.request_id} {failed.error.code}" for failed in news.failed]
    assert core.scheduler.pool.used == 0
    return seen


def test_a_step_that_fails_ends_the_requests_in_it_and_no_others() -> None:
    core, runner = make_core()
    core.add(request("a"))
    runner.failing = True
    core.step()
    runner.failing = False
    core.add(request("b"))
    assert finish(core) == ["a engine_failed", "b.0 length"]


def test_steps_that_fail_again_and_again_are_fatal() -> None:
    core, runner = make_core()
    runner.failing = True
    for number in range(MAX_FAILED_STEPS - 1):
        core.add(request(f"r{number}"))
        core.step()
    core.add(request("last"))
    with pytest.raises(EngineDead, match="broken on purpose"):
        core.step()


def test_a_step_that_works_forgives_the_failures_before_it() -> None:
    core, runner = make_core()
    for number in range(2 * MAX_FAILED_STEPS):
        core.add(request(f"bad{number}"))
        runner.failing = True
        core.step()
        runner.failing = False
        core.add(request(f"good{number}"))
        finish(core)


def test_a_token_that_cannot_be_chosen_ends_every_choice_of_its_request_only() -> None:
    core, runner = make_core()
    runner.sick["a"] = EngineFailed("no numbers")
    core.add(request("a", choices=3))
    core.add(request("b"))
    assert finish(core) == ["a engine_failed", "b.0 length"]


def test_choices_follow_when_the_first_has_computed_the_prompt() -> None:
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
