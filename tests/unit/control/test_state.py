"""The state machine of commands, without I/O: every reachable state, and random sequences of commands and failures."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.control.capability_check import pause_modes
from baton.control.state import (
    DeregisterReason,
    Drain,
    Hold,
    HoldMode,
    Plan,
    Settlement,
    WorkerState,
    executed,
    next_settlement,
    plan_command,
    reply_to,
)
from baton.errors import Conflict
from baton.ports.engine import Capabilities
from baton.protocol.commands import (
    ClearCache,
    Command,
    Continue,
    FromDisk,
    Outcome,
    Pause,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    UpdateWeights,
)

TAGS = ("kv_cache", "weights")
UPDATE = UpdateWeights(source=FromDisk(path="/m"), version="2")
FULL = Capabilities(
    memory_tags=frozenset(TAGS),
    pause_modes=frozenset({"abort", "retract", "keep"}),
    weight_sources=frozenset({"disk"}),
)
UNHEALTHY, COMMANDED = DeregisterReason.UNHEALTHY, DeregisterReason.COMMANDED
DONE = Outcome(message="done")

tags = st.lists(st.sampled_from(TAGS), min_size=1, max_size=3).map(tuple)
commands: st.SearchStrategy[Command] = st.one_of(
    st.builds(Pause, mode=st.sampled_from(["abort", "retract", "keep", "drain"])),
    st.just(Continue()),
    st.builds(ReleaseMemory, tags=tags),
    st.builds(ResumeMemory, tags=tags),
    st.just(UPDATE),
    st.builds(SetWeightVersion, version=st.sampled_from(["a", "b"])),
    st.just(ClearCache()),
)
ENGINES = {
    "every pause mode": FULL,
    "keep": Capabilities(memory_tags=frozenset(TAGS), pause_modes=frozenset({"keep"})),
    "abort": Capabilities(memory_tags=frozenset(TAGS), pause_modes=frozenset({"abort"})),
    "no pause": Capabilities(memory_tags=frozenset(TAGS)),
}
ENDINGS = ("ok", "quiet", "fail")
"""The engine reports what is released, reports nothing, or refuses."""
EVERY_COMMAND: tuple[Command, ...] = (
    *(Pause(mode=mode) for mode in ("abort", "retract", "keep", "drain")),  # type: ignore[arg-type]
    Continue(),
    *(kind(tags=some) for kind in (ReleaseMemory, ResumeMemory) for some in (TAGS, TAGS[:1], TAGS[1:])),
    UPDATE,
    SetWeightVersion(version="a"),
    ClearCache(),
)
engines = st.sampled_from(list(ENGINES.values()))
events = st.tuples(commands, st.sampled_from(ENDINGS))
health = st.booleans()


class EngineRefused(Exception):
    """The simulated engine refused a command."""


class Simulation:
    """Executes plans as the controller does, on an engine that checks every call and may refuse the planned one."""

    def __init__(self, can: Capabilities) -> None:
        self.can = can
        self.state = WorkerState()
        self.registered = True
        self.engine_held: HoldMode | None = None
        self.engine_released: set[str] = set()
        self.drained = False

    def run(self, command: Command, ending: str) -> Outcome | None:
        """Execute `command`; return its reply, None if it failed."""
        if isinstance(command, Pause) and command.mode not in pause_modes(self.can):
            return None  # refused before there is a plan
        before = self.state
        self.drained = False
        try:
            plan = plan_command(self.state, command, self.can)
        except Conflict:
            assert self.state == before
            return None
        if plan.deregisters:
            self.change(self.state.with_reason(COMMANDED))
        try:
            for step in plan.preparations:
                self.prepare(step)
            outcome = self.call(plan.command, ending) if plan.calls_engine else Outcome(message="")
        except EngineRefused:
            if plan.deregisters:
                self.settle()
            return None
        self.state = executed(self.state, plan.command, outcome)
        if plan.settles:
            self.settle()
        return reply_to(self.state, plan, outcome)

    def prepare(self, step: Drain | Hold) -> None:
        if isinstance(step, Drain):
            self.drained = True
            return
        self.call(Pause(mode=step.mode), "quiet")
        self.state = self.state.holding(step.mode)

    def settle(self) -> None:
        while (step := next_settlement(self.state)) is not None:
            if step is Settlement.CONTINUE:
                self.state = executed(self.state, Continue(), self.call(Continue(), "quiet"))
            else:
                self.change(self.state.without_reason(COMMANDED))

    def change(self, state: WorkerState) -> None:
        self.state = state
        self.registered = state.registrable

    def call(self, command: Command, ending: str) -> Outcome:
        if ending == "fail":
            raise EngineRefused
        match command:
            case Pause(mode=mode):
                assert mode in self.can.pause_modes
                self.engine_held = mode if mode != "drain" else None
            case Continue():
                assert not self.engine_released, "an engine without its memory must not step"
                self.engine_held = None
            case ReleaseMemory(tags=released):
                assert not self.registered
                assert released
                assert not self.engine_released & set(released), "released twice"
                assert self.engine_held is not None or self.drained, "released under running requests"
                self.engine_released |= set(released)
            case ResumeMemory(tags=resumed):
                assert resumed
                assert set(resumed) <= self.engine_released, "resumed what is not released"
                self.engine_released -= set(resumed)
            case UpdateWeights():
                assert "weights" not in self.engine_released
            case _:
                pass
        if ending == "quiet":
            return DONE
        return Outcome(message="done", released=tuple(sorted(self.engine_released)))

    def set_healthy(self, healthy: bool) -> None:
        self.change(self.state.without_reason(UNHEALTHY) if healthy else self.state.with_reason(UNHEALTHY))

    def check(self) -> None:
        """What holds between two commands."""
        state = self.state
        assert (state.held is None) == (self.engine_held is None)
        assert set(state.released) == self.engine_released
        assert (COMMANDED in state.reasons) == (state.paused or bool(state.released))
        assert self.registered == (not state.reasons)
        if self.registered:
            assert not state.idle

    def copy(self) -> "Simulation":
        """Return another simulation in the same state."""
        other = Simulation(self.can)
        other.state, other.registered, other.engine_held = self.state, self.registered, self.engine_held
        other.engine_released = set(self.engine_released)
        return other

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that distinguishes two simulations of one engine."""
        return self.state, self.registered, self.engine_held, frozenset(self.engine_released)


def reachable(can: Capabilities) -> Iterator[Simulation]:
    """Yield a simulation in every state that commands, failures and health changes can reach."""
    pending = [Simulation(can)]
    seen = {pending[0].key}
    while pending:
        worker = pending.pop()
        yield worker
        for following in successors(worker):
            if following.key not in seen:
                seen.add(following.key)
                pending.append(following)


def successors(worker: Simulation) -> Iterator[Simulation]:
    for command, ending in itertools.product(EVERY_COMMAND, ENDINGS):
        following = worker.copy()
        following.run(command, ending)
        yield following
    for healthy in (False, True):
        following = worker.copy()
        following.set_healthy(healthy)
        yield following


@pytest.mark.parametrize("can", ENGINES.values(), ids=ENGINES)
def test_engine_and_discovery_follow_every_reachable_state(can: Capabilities) -> None:
    count = 0
    for worker in reachable(can):
        worker.check()
        count += 1
    assert count > 20


@pytest.mark.parametrize("can", ENGINES.values(), ids=ENGINES)
def test_resuming_everything_continuing_and_health_register_the_worker(can: Capabilities) -> None:
    for worker in reachable(can):
        worker.run(ResumeMemory(tags=TAGS), "ok")
        worker.run(Continue(), "ok")
        worker.set_healthy(True)
        assert worker.registered
        assert worker.engine_held is None
        assert not worker.state.idle


def test_a_repeated_command_changes_nothing() -> None:
    for start, command in itertools.product(list(reachable(FULL)), EVERY_COMMAND):
        worker = start.copy()
        first = worker.run(command, "ok")
        state = worker.state
        second = worker.run(command, "ok")
        assert worker.state == state
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert (first.paused, first.released) == (second.paused, second.released)


@settings(max_examples=80, deadline=None)
@given(engines, st.lists(st.one_of(events, health), max_size=12))
def test_engine_and_discovery_follow_any_sequence(can: Capabilities, history: list[Any]) -> None:
    worker = Simulation(can)
    for event in history:
        if isinstance(event, bool):
            worker.set_healthy(event)
        else:
            worker.run(*event)
        worker.check()


@pytest.mark.parametrize(
    ("held", "released_tags", "preparations"),
    [
        (None, ("weights",), (Hold("keep"),)),
        (None, ("kv_cache",), (Hold("retract"),)),
        ("keep", ("weights",), ()),
        ("keep", ("weights", "kv_cache"), (Hold("retract"),)),
        ("retract", ("kv_cache",), ()),
        ("abort", ("kv_cache",), ()),
    ],
)
def test_an_engine_is_held_before_a_release_only_as_far_as_it_is_not(
    held: HoldMode | None, released_tags: tuple[str, ...], preparations: tuple[Any, ...]
) -> None:
    plan = plan_command(WorkerState(held=held), ReleaseMemory(tags=released_tags), FULL)
    assert plan.preparations == preparations


def test_a_weaker_hold_does_not_undo_a_stronger_one() -> None:
    state = WorkerState().holding("abort").holding("keep")
    assert state.held == "abort"
    assert state.holding("retract").held == "abort"
    assert WorkerState().holding("keep").holding("retract").held == "retract"


def test_what_the_engine_reports_overrides_what_was_asked() -> None:
    released = Outcome(message="", released=("weights",))
    assert executed(WorkerState(), ReleaseMemory(tags=TAGS), released).released == ("weights",)
    assert executed(WorkerState(released=TAGS), ResumeMemory(tags=TAGS), released).released == ("weights",)
    assert not executed(WorkerState(), Pause(), Outcome(message="", paused=False)).paused
    still = executed(WorkerState(paused=True, held="keep"), Continue(), Outcome(message="", paused=True))
    assert (still.paused, still.held) == (True, "keep")
    updated = executed(WorkerState(), UPDATE, Outcome(message="", weight_version="2-checked"))
    assert updated.weight_version == "2-checked"


def test_a_drain_reaches_the_engine_as_a_pause_that_keeps() -> None:
    plan = plan_command(WorkerState(), Pause(mode="drain", timeout_s=5.0), FULL)
    assert plan == Plan(Pause(mode="keep"), deregisters=True, preparations=(Drain(5.0),), settles=True)


def test_a_worker_that_shuts_down_is_never_registrable() -> None:
    assert WorkerState().registrable
    assert not WorkerState().shutting_down().registrable
    assert not WorkerState(reasons=frozenset({UNHEALTHY})).registrable
