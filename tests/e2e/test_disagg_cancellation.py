"""Whoever leaves a disaggregated request, and whenever: both workers get rid of all that they held for it.

Times are printed and put into the report; the limits that are asserted leave room for a busy machine. A worker tells
its engine's load now and then, so that a time may be longer by up to the pause between two of these readings.
"""

import collections
import itertools
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest

pytest.importorskip("torch")

from tests.doubles.tiny_models import make_tiny_model
from tests.e2e.disagg import (
    DECODE,
    PREFILL,
    Reading,
    difference,
    held,
    rooms,
    seconds_until,
    seconds_until_free,
)
from tests.e2e.harness import Serve, error_in, events, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

COMPLETIONS = "/v1/completions"
MODEL = "heavy"
# One request is computed at a time, in steps of a few dozen milliseconds.
STEPS = ("--torch-max-running", "1", "--torch-batch-tokens", "32", "--torch-threads", "1", "--torch-blocks", "1024")
QUIET = ("--canary-interval-s", "600")
CLAIM_S = 3.0
LATE = ("--kv-handoff", "late", "--kv-transports", "tcp", "--kv-claim-timeout-s", str(CLAIM_S))
LONG_TOKENS = 3000  # seconds of prefill
SHORT_TOKENS = 20
FREE_S = 5.0  # asserted; measured is what the report says
PREFILL_S = 200.0  # a long prompt, computed on a busy machine
DEADLINE_S = 1.5

Note = Callable[[str, float], None]
numbers = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with which a prefill takes its time."""
    directory: Path = tmp_path_factory.mktemp("models") / MODEL
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    size = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "max_position_embeddings": 16384}
    return str(make_tiny_model(directory, **size, **heads))


@pytest.fixture(scope="module")
def early(start_shared: Callable[..., Serve], model: str) -> Iterator[Serve]:
    """Decode is called together with prefill."""
    serve = start_shared(Serve, "--model", model, *STEPS, *QUIET, engine="torch", prefill=1, decode=1)
    yield serve
    serve.stop()


@pytest.fixture(scope="module")
def late(start_shared: Callable[..., Serve], model: str) -> Iterator[Serve]:
    """Decode is called after prefill."""
    serve = start_shared(Serve, "--model", model, *STEPS, *QUIET, *LATE, engine="torch", prefill=1, decode=1)
    yield serve
    serve.stop()


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    """Write a measured time into the report and to the output."""

    def write(what: str, seconds: float) -> None:
        record_property(what, round(seconds, 3))
        print(f"{what}: {seconds:.3f} s")

    return write


def asking(tokens: int, answer: int = 8, **more: object) -> dict[str, object]:
    """Return a request with a prompt that nobody has sent before."""
    prompt = f"{next(numbers)} {time.monotonic_ns()} ".ljust(tokens, "x")
    return {"model": MODEL, "prompt": prompt, "max_tokens": answer, "ignore_eos": True, **more}


def prefilling(serve: Serve, requests: int = 1) -> bool:
    """Whether the prefill worker has so many requests and computes; it may work on several in turn."""
    now = Reading(serve, PREFILL).held
    running, waiting, inside, blocks = (now.get(n, 0) for n in ("running", "waiting", "in_flight", "used_blocks"))
    return running > 0 and blocks > 0 and running + waiting == inside == requests


def assert_serves(serve: Serve) -> None:
    """The very next request is answered."""
    status, text = serve.post(COMPLETIONS, asking(SHORT_TOKENS))
    assert status == 200, text
    assert json.loads(text)["usage"]["completion_tokens"] == 8


# Leaving, early hand-off


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_leaving_the_queue_frees_the_room_and_leaves_the_running_prefill_alone(
    early: Serve, stream: bool, note: Note
) -> None:
    before, ended = Reading(early, PREFILL), rooms(early)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(early.post, COMPLETIONS, asking(LONG_TOKENS // 2))
        eventually(lambda: prefilling(early), what="the first is in prefill")
        with early.open(COMPLETIONS, asking(LONG_TOKENS, stream=stream)):
            eventually(lambda: Reading(early, PREFILL).held.get("waiting") == 1, what="the second waits")
        took_s = seconds_until(lambda: prefilling(early), FREE_S, lambda: held(early))
        now = Reading(early, PREFILL)
        assert now.ended("prefill", "cancelled") == before.ended("prefill", "cancelled") + 1
        assert not first.done(), "the first one should still be computed"
        status, text = first.result(PREFILL_S)
    assert status == 200, text
    seconds_until_free(early, FREE_S)
    assert difference(rooms(early), ended) == {"done": 1, "cancelled": 1}
    note("left the queue, freed after", took_s)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_leaving_in_prefill_frees_both_workers(early: Serve, stream: bool, note: Note) -> None:
    ended = rooms(early)
    with early.open(COMPLETIONS, asking(LONG_TOKENS, stream=stream)):
        eventually(lambda: prefilling(early), what="the request is in prefill")
        eventually(lambda: Reading(early, PREFILL).held.get("claimed") == 1, what="decode has claimed the room")
        time.sleep(0.3)
        assert prefilling(early)
    note("left in prefill, freed after", seconds_until_free(early, FREE_S))
    assert difference(rooms(early), ended) == {"cancelled": 1}
    assert_serves(early)


def test_a_client_that_times_out_in_prefill_is_a_client_that_leaves(early: Serve, note: Note) -> None:
    ended, request = rooms(early), asking(LONG_TOKENS)
    del request["ignore_eos"]
    with pytest.raises(openai.APITimeoutError):
        early.client().completions.create(**request, timeout=0.5)
    note("timed out in prefill, freed after", seconds_until_free(early, FREE_S))
    assert difference(rooms(early), ended) == {"cancelled": 1}


@pytest.mark.parametrize(("style", "n"), [("early", 1), ("late", 1), ("late", 2)])
def test_leaving_a_stream_between_two_tokens_frees_both_workers(
    style: str, n: int, request: pytest.FixtureRequest, note: Note
) -> None:
    serve: Serve = request.getfixturevalue(style)
    ended, before = rooms(serve), Reading(serve, DECODE)
    body = asking(SHORT_TOKENS, 4000, n=n)
    del body["ignore_eos"]
    answer = serve.client(strict=False).completions.create(**body, stream=True, extra_body={"ignore_eos": True})
    with answer as stream:
        for _ in zip(range(5), stream, strict=False):
            pass
        eventually(lambda: Reading(serve, DECODE).held.get("running") == 1, what="it decodes")
    note(f"left a stream of {n} ({style}), freed after", seconds_until_free(serve, FREE_S))
    assert Reading(serve, DECODE).ended("decode", "cancelled") == before.ended("decode", "cancelled") + 1
    assert difference(rooms(serve), ended) == {"done": 1}


@pytest.mark.parametrize("style", ["early", "late"])
def test_leaving_while_a_whole_answer_is_made_frees_both_workers(
    style: str, request: pytest.FixtureRequest, note: Note
) -> None:
    serve: Serve = request.getfixturevalue(style)
    before = Reading(serve, DECODE)
    with serve.open(COMPLETIONS, asking(SHORT_TOKENS, 4000)):
        eventually(lambda: Reading(serve, DECODE).held.get("running") == 1, what="it decodes")
        eventually(lambda: not Reading(serve, PREFILL).held, what="prefill is done with it")
    note(f"left in decode ({style}), freed after", seconds_until_free(serve, FREE_S))
    assert Reading(serve, DECODE).ended("decode", "cancelled") == before.ended("decode", "cancelled") + 1


# Leaving, late hand-off: nobody tells the prefill worker, so it computes to the end and is declined then.


def test_leaving_a_late_prefill_frees_both_workers_once_it_is_computed(late: Serve, note: Note) -> None:
    ended, before, decode = rooms(late), Reading(late, PREFILL), Reading(late, DECODE)
    with late.open(COMPLETIONS, asking(LONG_TOKENS // 2)):
        eventually(lambda: prefilling(late), what="the request is in prefill")
    computed = lambda: (  # noqa: E731 - a name for what is waited for
        Reading(late, PREFILL).ended("prefill", "completed") > before.ended("prefill", "completed")
    )
    note("left in a late prefill, computed after", seconds_until(computed, PREFILL_S, lambda: held(late)))
    took_s = seconds_until_free(late, CLAIM_S + FREE_S)
    note("... and freed after another", took_s)
    # Decode is called all the same, and told to stop a moment later; now and then it has the KV by then.
    assert difference(rooms(late), ended) in ({"cancelled": 1}, {"expired": 1}, {"done": 1})
    assert Reading(late, DECODE).ended("decode", "completed") == decode.ended("decode", "completed")
    assert_serves(late)


def test_leaving_the_queue_of_late_prefills_frees_everything(late: Serve, note: Note) -> None:
    ended = rooms(late)
    connections = [late.open(COMPLETIONS, asking(LONG_TOKENS // 2)) for _ in range(4)]
    eventually(lambda: Reading(late, PREFILL).held.get("in_flight") == 4, what="one is computed and three wait")
    for connection in connections:
        connection.close()
    assert_serves(late)
    note("left the queue of late prefills, freed after", seconds_until_free(late, PREFILL_S))
    seen = difference(rooms(late), ended)
    assert sum(seen.values()) == 5
    assert seen.get("failed", 0) == 0


# The milliseconds between prefill and decode


@pytest.mark.faults
@pytest.mark.parametrize(("style", "times"), [("early", 30), ("late", 30)])
def test_leaving_around_the_end_of_prefill_frees_both_workers(
    style: str, times: int, request: pytest.FixtureRequest, note: Note
) -> None:
    """The moment of leaving closes in on the hand-off from both sides: steps grow until it is passed, then shrink."""
    serve: Serve = request.getfixturevalue(style)
    assert_serves(serve)
    began = time.monotonic()
    assert serve.post(COMPLETIONS, asking(64, 2))[0] == 200
    leave_s, step_s, longest_s, both = time.monotonic() - began, 0.016, 0.0, {"cancelled", "done"}
    tally: collections.Counter[tuple[str, str]] = collections.Counter()
    was_late = True
    while tally.total() < times or (tally.total() < 4 * times and not both <= {room for room, _ in tally}):
        seen, free_s = leave_after(serve, leave_s)
        tally[seen] += 1
        longest_s = max(longest_s, free_s)
        is_late = seen[1] == "a token"
        step_s = min(2 * step_s, 0.25) if is_late == was_late else max(0.002, step_s / 3)
        leave_s = max(0.005, leave_s - step_s if is_late else leave_s + step_s)
        was_late = is_late
    for (room, token), count in sorted(tally.items()):
        print(f"{style}: room {room}, {token}: {count} of {tally.total()}")
    note(f"left around the hand-off ({style}), longest time to be free", longest_s)
    assert {room for room, _ in tally} >= both
    assert not {room for room, _ in tally} & {"failed", "expired"}
    assert_serves(serve)


def leave_after(serve: Serve, seconds: float) -> tuple[tuple[str, str], float]:
    """Leave a request after `seconds`; return how its room ended and whether a token was made, and the time to be free.

    The room is "none" where the client was gone before there was one, as when the frontend was too busy to send the
    request to a worker.
    """
    before, ended = Reading(serve, DECODE), rooms(serve)
    prefills = sum(Reading(serve, PREFILL).ended("prefill", state) for state in ("completed", "cancelled"))
    with serve.open(COMPLETIONS, asking(64, 50, stream=True)):
        time.sleep(seconds)

    def over() -> bool:
        now = Reading(serve, PREFILL)
        return sum(now.ended("prefill", state) for state in ("completed", "cancelled")) > prefills and not held(serve)

    try:
        free_s = seconds_until(over, CLAIM_S + FREE_S, lambda: held(serve))
    except AssertionError:
        if held(serve):
            raise
        return ("none", "no token"), 0.0
    first = "baton_first_output_seconds_count"
    token = "a token" if Reading(serve, DECODE).value(first) > before.value(first) else "no token"
    return (next(iter(difference(rooms(serve), ended)), "none"), token), free_s


# Those who come after


@pytest.mark.slow
def test_a_request_behind_cancelled_prefills_does_not_wait_for_them(early: Serve, note: Note) -> None:
    prefill = early.worker(PREFILL)
    idle_s, _ = timed(lambda: assert_serves(early))
    whole_s, whole_cpu_s = timed(lambda: early.post(COMPLETIONS, asking(LONG_TOKENS)), prefill)
    before = Reading(early, PREFILL)

    def behind() -> float:
        connections = [early.open(COMPLETIONS, asking(LONG_TOKENS)) for _ in range(6)]
        eventually(lambda: prefilling(early, requests=6), what="six are in prefill")
        for connection in connections:
            connection.close()
        return timed(lambda: assert_serves(early))[0]

    behind_s: list[float] = []
    _, six_cpu_s = timed(lambda: behind_s.append(behind()), prefill)
    seconds_until_free(early, FREE_S)
    note("a short request alone", idle_s)
    note("a short request behind six cancelled prefills", behind_s[0])
    note("one long request to its end", whole_s)
    note("processor time of one long prefill", whole_cpu_s)
    note("processor time of six cancelled ones and the short one", six_cpu_s)
    now = Reading(early, PREFILL)
    assert now.ended("prefill", "cancelled") == before.ended("prefill", "cancelled") + 6
    assert six_cpu_s < 2 * whole_cpu_s


def timed(work: Callable[[], object], process: psutil.Process | None = None) -> tuple[float, float]:
    """Return how long `work` took, and how much of the processor `process` used meanwhile."""
    began, used = time.monotonic(), _processor_s(process)
    work()
    return time.monotonic() - began, _processor_s(process) - used


def _processor_s(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return times.user + times.system


# Deadlines


@pytest.fixture(scope="module", params=["early", "late"])
def hurried(start_shared: Callable[..., Serve], model: str, request: pytest.FixtureRequest) -> Iterator[Serve]:
    """Requests get little time."""
    flags = (*STEPS, *QUIET, *(LATE if request.param == "late" else ()), "--request-timeout-s", str(DEADLINE_S))
    serve = start_shared(Serve, "--model", model, *flags, engine="torch", prefill=1, decode=1)
    yield serve
    serve.stop()


def test_a_deadline_in_prefill_frees_both_workers(hurried: Serve, note: Note) -> None:
    status, text = hurried.post(COMPLETIONS, asking(2 * LONG_TOKENS))
    assert (status, error_in(text)["code"]) == (504, "deadline_exceeded"), text
    note("deadline in prefill, freed after", seconds_until_free(hurried, FREE_S))
    assert Reading(hurried, PREFILL).ended("prefill", "expired") + Reading(hurried, DECODE).ended("decode", "expired")
    assert_serves(hurried)


def test_a_deadline_in_decode_frees_both_workers(hurried: Serve, note: Note) -> None:
    before = Reading(hurried, DECODE).ended("decode", "expired")
    status, text = hurried.post(COMPLETIONS, asking(SHORT_TOKENS, 8000, stream=True))
    assert status == 200
    *pieces, error, done = (data for _, data in events(text))
    assert len(pieces) > 2
    assert error_in(error)["code"] == "deadline_exceeded"
    assert done == "[DONE]"
    note("deadline in decode, freed after", seconds_until_free(hurried, FREE_S))
    assert Reading(hurried, DECODE).ended("decode", "expired") == before + 1
    assert_serves(hurried)


# Shutdown


class Asked:
    """A request whose answer is collected meanwhile, whatever it is."""

    def __init__(self, serve: Serve, body: dict[str, object]) -> None:
        self.answer: Future[tuple[int, str]] = Future()
        threading.Thread(target=self._collect, args=(serve, body), daemon=True).start()

    def _collect(self, serve: Serve, body: dict[str, object]) -> None:
        try:
            self.answer.set_result(serve.post(COMPLETIONS, body))
        except OSError as error:  # the frontend is gone
            self.answer.set_result((0, repr(error)))


@pytest.fixture
def brief(start: Callable[..., Serve], model: str) -> Callable[..., Serve]:
    """Start one whose workers have a second to drain; the test ends them."""
    flags = (*STEPS, *QUIET, "--drain-timeout-s", "1")
    return lambda *more: start(Serve, "--model", model, *flags, *more, engine="torch", prefill=1, decode=1)


@pytest.mark.faults
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("victim", [PREFILL, DECODE], ids=["prefill worker", "decode worker"])
@pytest.mark.parametrize("style", ["early", "late"])
def test_a_worker_that_is_told_to_stop_leaves_the_other_nothing(
    brief: Callable[..., Serve], style: str, victim: int, phase: str, note: Note
) -> None:
    serve = brief(*(LATE if style == "late" else ()), "--migrations", "0")
    other = 1 - victim
    asked = Asked(
        serve, asking(LONG_TOKENS) if phase == "prefill" else asking(SHORT_TOKENS, 600 if victim == PREFILL else 2000)
    )
    if phase == "prefill":
        eventually(lambda: prefilling(serve), what="the request is in prefill")
    else:
        eventually(lambda: Reading(serve, DECODE).held.get("running") == 1, what="the request is in decode")
    process = serve.worker(victim)
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    what = f"{style}, {phase}, SIGTERM to the {'prefill' if victim == PREFILL else 'decode'} worker"
    goes_on = (victim, phase) == (PREFILL, "decode")  # it has what it needs
    computes_on = (style, victim, phase) == ("late", DECODE, "prefill")  # nobody tells it
    limit_s = PREFILL_S if goes_on or computes_on else FREE_S
    alone = lambda: not Reading(serve, other).held  # noqa: E731 - a name for what is waited for
    note(f"{what}: the other is free after", seconds_until(alone, limit_s, lambda: Reading(serve, other).held))
    status, text = asked.answer.result(30)
    print(f"{what}: {status} {text[:120]!r}")
    assert status in ((200,) if goes_on else (200, 404, 499, 500, 503)), text
    if status != 200:
        assert error_in(text)
    eventually(lambda: serve.post(COMPLETIONS, asking(SHORT_TOKENS))[0] == 200, 60, "a new worker serves")
    seconds_until_free(serve, FREE_S)
    serve.stop()


@pytest.mark.faults
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_server_that_is_told_to_stop_leaves_nothing(brief: Callable[..., Serve], phase: str, note: Note) -> None:
    serve = brief()
    asked = [Asked(serve, asking(LONG_TOKENS) if phase == "prefill" else asking(SHORT_TOKENS, 4000)) for _ in range(3)]
    if phase == "prefill":
        eventually(lambda: prefilling(serve, requests=3), what="three are in prefill")
    else:
        eventually(lambda: Reading(serve, DECODE).held.get("running") == 1, what="one is in decode")
    began = time.monotonic()
    serve.stop()  # asserts that it ends with 0 and leaves no process
    note(f"SIGTERM to the server in {phase}: gone after", time.monotonic() - began)
    for request in asked:
        status, text = request.answer.result(10)
        print(status, text[:120])
        assert status in (0, 200, 499, 500, 503), text
