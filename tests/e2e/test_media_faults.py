"""Requests with images that are cancelled, and encode workers that die or freeze: nothing hangs and nothing is left."""

import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Serve, eventually
from tests.e2e.test_media_layouts import (
    answer_to,
    ask,
    assert_nothing_is_left,
    content,
    encoder_of,
    picture,
    said_to,
    start,
    wait_for_encoders,
)

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(300)]

LAYOUT = "E/P/D"
PREFILL, DECODE, ENCODE = 0, 1, encoder_of(LAYOUT)
QUICK = ("--kv-peer-timeout-s", "2", "--stall-timeout-s", "4")


def started(directory: Path, *more: str) -> Serve:
    system = start(directory, LAYOUT, *QUICK, *more)
    try:
        system.wait_ready()
        wait_for_encoders(system, LAYOUT)
    except BaseException:
        system.close()
        raise
    return system


def send_and_leave(system: Serve, when: Callable[[], Any], number: int) -> None:
    """Ask, and disconnect as soon as `when` is true."""
    parts = ("x" * 40, picture(100 + number, 20))
    body = {"model": "echo", "max_tokens": 4000, "stream": True}
    connection = system.open(
        "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": content(*parts)}]}
    )
    with connection:
        eventually(when, what="the phase begins")


def test_a_request_that_is_left_in_any_phase_frees_everything_on_every_worker(tmp_path: Path) -> None:
    system = started(tmp_path, "--echo-encode-ms", "700", "--echo-prefill-ms", "700", "--echo-pace-ms", "20")
    try:
        phases: list[Callable[[], Any]] = [
            lambda: system.metric("baton_requests_in_flight", ENCODE),
            lambda: system.metric("baton_engine_running_requests", PREFILL),
            lambda: system.metric("baton_engine_running_requests", DECODE),
        ]
        for number, phase in enumerate(phases):
            send_and_leave(system, phase, number)
            assert_nothing_is_left(system)
        image = picture(90, 20)
        assert answer_to(system, "still ", image) == said_to("still ", image)
        system.stop()
    finally:
        system.close()


@pytest.mark.parametrize("local", ["auto", "never"])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_an_encode_worker_that_fails_while_requests_wait_hangs_none(
    tmp_path: Path, fault: signal.Signals, local: str
) -> None:
    system = started(tmp_path, "--echo-encode-ms", "1000", "--media-local-encoding", local)
    try:
        images = [picture(20 + number, 30) for number in range(5)]
        with ThreadPoolExecutor(len(images)) as pool:
            asked: list[Future[tuple[int, dict[str, Any]]]] = [pool.submit(ask, system, each) for each in images]
            eventually(
                lambda: system.metric("baton_requests_in_flight", ENCODE) == len(images), what="all are being encoded"
            )
            system.worker(ENCODE).send_signal(fault)
            answers = [each.result(timeout=60) for each in asked]
        for image, (status, answer) in zip(images, answers, strict=True):
            if status == 200:
                assert answer["choices"][0]["message"]["content"] == said_to(image)
            else:
                assert local == "never"
                assert status == 503, answer
        eventually(lambda: system.health(ENCODE) == 200, 60.0, "the encode worker is back")
        assert_nothing_is_left(system)
        eventually(lambda: ask(system, picture(9, 9))[0] == 200, 30.0, "images are answered again")
        system.stop()
    finally:
        system.close()
