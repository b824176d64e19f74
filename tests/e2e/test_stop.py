"""`baton serve` ends when it is told to, whatever its clients and its processes do."""

import signal
import socket
import time
from collections.abc import Callable

import pytest

from tests.e2e.harness import Serve, eventually

pytestmark = [pytest.mark.e2e]

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: me\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"


def stop(serve: Serve) -> float:
    """Stop it; return how long that took."""
    began = time.monotonic()
    serve.stop()
    return time.monotonic() - began


def test_half_a_request_does_not_hold_it_up(start: Callable[..., Serve]) -> None:
    serve = start(Serve, "--router", "kv", workers=2)
    with socket.create_connection(("127.0.0.1", serve.port)) as connection:
        connection.sendall(HALF)
        assert stop(serve) < 25
    assert "did not exit" not in serve.process.output.read_text()


@pytest.mark.slow
def test_a_frozen_worker_is_killed_and_named(start: Callable[..., Serve]) -> None:
    serve = start(Serve, "--drain-timeout-s", "1", workers=2)
    serve.worker(1).send_signal(signal.SIGSTOP)
    assert stop(serve) < 40
    output = serve.process.output.read_text()
    assert "worker-1 did not exit within 16 s" in output
    assert "worker-0 did not" not in output


@pytest.mark.faults
def test_a_worker_that_was_frozen_until_discovery_forgot_it_comes_back(start: Callable[..., Serve]) -> None:
    serve = start(Serve, "--canary-interval-s", "1", workers=2)
    frozen = serve.worker(1)
    frozen.send_signal(signal.SIGSTOP)
    eventually(lambda: serve.instances() == 1, 20, "discovery has forgotten it")
    frozen.send_signal(signal.SIGCONT)
    eventually(lambda: serve.instances() == 2, 30, "it is back")
    assert serve.worker(1).pid == frozen.pid, "it has registered again"
    before = serve.ended("completed", 1)
    body = {"model": "echo", "prompt": "hello", "max_tokens": 2}
    eventually(
        lambda: serve.post("/v1/completions", body)[0] == 200 and serve.ended("completed", 1) > before,
        30,
        "it gets requests",
    )
    serve.stop()
