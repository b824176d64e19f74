"""A client that leaves is noticed in every phase of its request, and its blocks are free again; so with deadlines."""

from collections.abc import Callable, Iterator

import openai
import pytest

from tests.e2e.harness import Serve, error_in, events, eventually

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
LONG = {"model": "echo", "messages": [{"role": "user", "content": "Hello, world. " * 4}], "max_tokens": 20_000}


@pytest.fixture(scope="module")
def slow_start(start_shared: Callable[..., Serve]) -> Iterator[Serve]:
    """An engine that runs one request at a time and needs seconds for its first token."""
    serve = start_shared(
        Serve,
        "--echo-max-running",
        "1",
        "--echo-prefill-ms",
        "3000",
        "--echo-pace-ms",
        "10",
        "--canary-interval-s",
        "600",
    )
    yield serve
    serve.stop()


@pytest.fixture(scope="module")
def paced(start_shared: Callable[..., Serve]) -> Iterator[Serve]:
    """An engine with time between two tokens."""
    serve = start_shared(Serve, "--echo-pace-ms", "10")
    yield serve
    serve.stop()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_leaving_in_prefill_frees_every_block(slow_start: Serve, stream: bool) -> None:
    before = slow_start.ended("cancelled")
    with slow_start.open(CHAT, {**LONG, "stream": stream}):
        eventually(lambda: slow_start.load()["running"] == 1, what="the request is in prefill")
        assert slow_start.load()["used_blocks"] > 0
    slow_start.assert_quiet()
    assert slow_start.ended("cancelled") == before + 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_leaving_the_queue_leaves_the_running_request_alone(slow_start: Serve, stream: bool) -> None:
    before = slow_start.ended("cancelled")
    with slow_start.open(CHAT, {**LONG, "stream": True}):
        eventually(lambda: slow_start.load()["running"] == 1, what="the first request runs")
        with slow_start.open(CHAT, {**LONG, "stream": stream}):
            eventually(lambda: slow_start.load()["waiting"] == 1, what="the second request waits")
        eventually(lambda: slow_start.ended("cancelled") == before + 1, what="the second request is cancelled")
        eventually(lambda: slow_start.load()["waiting"] == 0, what="the queue is empty")
        assert slow_start.load()["running"] == 1
        assert slow_start.load()["in_flight"] == 1
    slow_start.assert_quiet()
    assert slow_start.ended("cancelled") == before + 2


def test_leaving_a_stream_between_two_tokens_frees_every_block(paced: Serve) -> None:
    before = paced.ended("cancelled")
    stream = paced.client().chat.completions.create(**LONG, stream=True)
    next(iter(stream))
    assert paced.load()["in_flight"] == 1
    stream.close()
    paced.assert_quiet()
    assert paced.ended("cancelled") == before + 1


def test_leaving_while_the_answer_is_collected_frees_every_block(paced: Serve) -> None:
    before = paced.ended("cancelled")
    with paced.open(CHAT, LONG):
        eventually(lambda: paced.load()["running"] == 1, what="the request runs")
    paced.assert_quiet()
    assert paced.ended("cancelled") == before + 1


def test_leaving_with_several_choices_ends_them_all(paced: Serve) -> None:
    stream = paced.client().chat.completions.create(**LONG, n=8, stream=True)
    next(iter(stream))
    stream.close()
    paced.assert_quiet()


def test_a_client_that_times_out_is_a_client_that_leaves(paced: Serve) -> None:
    before = paced.ended("cancelled")
    with pytest.raises(openai.APITimeoutError):
        paced.client().chat.completions.create(**LONG, timeout=0.5)
    paced.assert_quiet()
    assert paced.ended("cancelled") == before + 1


def test_many_that_leave_at_once_leave_nothing(paced: Serve) -> None:
    before = paced.ended("cancelled")
    connections = [paced.open(CHAT, {**LONG, "stream": number % 2 == 0}) for number in range(60)]
    eventually(lambda: paced.load()["running"] == 60, what="all of them run")
    for connection in connections:
        connection.close()
    paced.assert_quiet()
    assert paced.ended("cancelled") == before + 60


@pytest.fixture(scope="module")
def hurried(start_shared: Callable[..., Serve]) -> Iterator[Serve]:
    """Requests get a second."""
    serve = start_shared(Serve, "--request-timeout-s", "1", "--echo-pace-ms", "10")
    yield serve
    serve.stop()


def test_a_request_past_its_deadline_is_refused_and_ended(hurried: Serve) -> None:
    before = hurried.ended("expired")
    status, text = hurried.post(CHAT, LONG)
    assert (status, error_in(text)["code"]) == (504, "deadline_exceeded")
    assert_serves(hurried)
    hurried.assert_quiet()
    assert hurried.ended("expired") == before + 1


def test_a_stream_past_its_deadline_ends_with_an_error_event(hurried: Serve) -> None:
    before = hurried.ended("expired")
    status, text = hurried.post(CHAT, {**LONG, "stream": True})
    assert status == 200
    *pieces, error, done = (data for _, data in events(text))
    assert len(pieces) > 10
    assert error_in(error)["code"] == "deadline_exceeded"
    assert done == "[DONE]"
    assert_serves(hurried)
    hurried.assert_quiet()
    assert hurried.ended("expired") == before + 1


def test_the_official_client_raises_for_a_stream_past_its_deadline(hurried: Serve) -> None:
    with pytest.raises(openai.APIError):
        list(hurried.client().chat.completions.create(**LONG, stream=True))
    assert_serves(hurried)


def assert_serves(serve: Serve) -> None:
    """The very next request is served."""
    answer = serve.client().chat.completions.create(model="echo", messages=[{"role": "user", "content": "Hello"}])
    assert answer.choices[0].message.content == "Hello"
