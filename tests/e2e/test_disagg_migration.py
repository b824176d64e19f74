"""A request that loses its KV or its worker moves: the client's text has no gap and no repeat, or ends in an error."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

from tests.e2e.disagg_load import (
    BOUND_S,
    EXACT,
    QUICK,
    Answer,
    Question,
    ask,
    assert_nothing_held,
    assert_replaced,
    letters,
    make_questions,
    reference,
)
from tests.e2e.harness import Serve, eventually

__all__ = ["letters"]

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(480)]

PREFILL, DECODE = (0, 1), (2, 3)
ROLES = {0: "prefill", 1: "prefill", 2: "decode", 3: "decode"}
# A prompt takes long when it is computed in small steps, and there is time to break something meanwhile.
SLOW_PREFILL = ("--torch-batch-tokens", "16")
LONG_PROMPTS = make_questions(12, prompt=(3300, 3600), tokens=(40, 60))
LONG_ANSWERS = make_questions(8, prompt=(50, 100), tokens=(3000, 3500))


@pytest.fixture(scope="module")
def texts(start_shared: Callable[..., Serve], letters: Path) -> dict[Question, str]:
    """What one worker that does everything answers."""
    whole = start_shared(Serve, "--model", str(letters), *EXACT, engine="torch")
    texts = reference(whole, [*LONG_PROMPTS, *LONG_ANSWERS])
    whole.stop()
    return texts


@pytest.fixture(scope="module", params=["early", pytest.param("late", marks=pytest.mark.faults)])
def moving(start_shared: Callable[..., Serve], letters: Path, request: pytest.FixtureRequest) -> Iterator[Serve]:
    """Two workers of each role."""
    flags = (*EXACT, *QUICK, *SLOW_PREFILL, "--kv-handoff", request.param)
    serve = start_shared(Serve, "--model", str(letters), *flags, engine="torch", prefill=2, decode=2)
    yield serve
    serve.stop()


@pytest.fixture
def unmoving(start: Callable[..., Serve], letters: Path) -> Iterator[Serve]:
    """Two workers of each role, and nothing moves."""
    flags = (*EXACT, *QUICK, *SLOW_PREFILL, "--migrations", "0")
    serve = start(Serve, "--model", str(letters), *flags, engine="torch", prefill=2, decode=2)
    yield serve
    serve.stop()


class Asking:
    """Questions that are asked at the same time, half of them for streams."""

    def __init__(self, serve: Serve, questions: list[Question]) -> None:
        self.answers: dict[Question, Answer] = {}
        self._questions = questions
        self._threads = [
            threading.Thread(target=self._ask, args=(serve, question, number % 4 in (0, 3)), daemon=True)
            for number, question in enumerate(questions)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, serve: Serve, question: Question, stream: bool) -> None:
        self.answers[question] = ask(serve, question, stream)

    def join(self) -> list[tuple[Question, Answer]]:
        """Return how they ended."""
        for thread in self._threads:
            thread.join(BOUND_S)
        return [(question, self.answers[question]) for question in self._questions]


class Broken(NamedTuple):
    """A worker that was killed, what was being asked, and how many requests it had in hand."""

    worker: int
    asking: Asking
    held: float


def break_prefill(serve: Serve) -> Broken:
    """Kill a prefill worker that computes prompts for which no token has been made."""
    asking = Asking(serve, LONG_PROMPTS)
    victim = serve.worker(PREFILL[0])
    held = eventually(lambda: in_hand(serve, PREFILL[0], 4), what="it computes")
    victim.kill()
    return Broken(PREFILL[0], asking, held)


def break_decode(serve: Serve) -> Broken:
    """Kill a decode worker in the middle of its answers."""

    def computed() -> float:
        return sum(serve.ended("completed", worker, "prefill") for worker in PREFILL)

    wanted = computed() + len(LONG_ANSWERS)
    asking = Asking(serve, LONG_ANSWERS)
    eventually(lambda: computed() == wanted, what="every prompt is computed")
    victim = serve.worker(DECODE[0])
    held = eventually(lambda: in_hand(serve, DECODE[0], 3), what="it generates")
    victim.kill()
    return Broken(DECODE[0], asking, held)


def in_hand(serve: Serve, worker: int, least: int) -> float:
    """Return how many requests a worker has, 0 if that is fewer than `least`."""
    count = serve.metric("baton_requests_in_flight", worker)
    return count if count >= least else 0


@pytest.mark.parametrize("break_one", [break_prefill, break_decode])
def test_what_was_lost_is_made_elsewhere_without_gap_or_repeat(
    moving: Serve, texts: dict[Question, str], break_one: Callable[[Serve], Broken]
) -> None:
    pids = {worker: moving.worker(worker).pid for worker in ROLES}
    before = {worker: moving.ended("completed", worker, role) for worker, role in ROLES.items()}
    victim, asking, held = break_one(moving)
    for question, answer in asking.join():
        assert (answer.status, answer.problem, answer.ended) == (200, "", True)
        assert answer.text == texts[question]
    assert_replaced(moving, victim, pids[victim], ROLES[victim])
    twin = victim ^ 1
    elsewhere = moving.ended("completed", twin, ROLES[victim]) - before[twin]
    elsewhere += moving.ended("completed", victim, ROLES[victim])  # a new process, that counts from 0
    asked = len(asking.answers)
    assert elsewhere >= asked / 2 + held, "what it had in hand was done by others"
    assert_nothing_held(moving, prefill=2)


def test_nothing_moves_when_it_must_not(unmoving: Serve, texts: dict[Question, str]) -> None:
    for break_one in (break_decode, break_prefill):
        eventually(lambda: unmoving.instances() == 4, 30, "the dead are forgotten: who is sent to them is lost")
        pids = {worker: unmoving.worker(worker).pid for worker in ROLES}
        victim, asking, _ = break_one(unmoving)
        lost = []
        for question, answer in asking.join():
            assert texts[question].startswith(answer.text)
            if answer.text != texts[question]:
                assert answer.is_error(503), answer
                lost.append(answer)
            else:
                assert answer.ended
        assert len(lost) >= 2
        assert {answer.status for answer in lost} <= {200, 503}
        assert_replaced(unmoving, victim, pids[victim], ROLES[victim])
        assert_nothing_held(unmoving, prefill=2)
