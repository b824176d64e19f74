"""The load of workers reaches the frontend: a busy one gets nothing more, and if all are busy the client is told."""

from collections.abc import Callable

import pytest

from tests.e2e.harness import Serve, eventually

pytestmark = [pytest.mark.e2e]

ASKED = 6
FLAGS = ("--busy-threshold", "0.5", "--echo-blocks", "64", "--echo-pace-ms", "100", "--echo-context", "1024")


def ask(serve: Serve) -> tuple[int, str]:
    return serve.post("/v1/completions", {"model": "echo", "prompt": "hi", "max_tokens": 1})


def occupy(serve: Serve, mark: str) -> Callable[[], None]:
    """Keep more than half of one worker's blocks in use; return what lets go of them."""
    body = {"model": "echo", "prompt": mark * 640, "max_tokens": 300, "stream": True}
    return serve.open("/v1/completions", body).close


def loads(serve: Serve) -> list[float]:
    return [serve.load(worker)["used_blocks"] for worker in range(serve.workers)]


def answers(serve: Serve) -> list[int]:
    return [ask(serve)[0] for _ in range(ASKED)]


@pytest.mark.parametrize("router", ["round-robin", "kv"])
def test_a_busy_worker_gets_nothing_more(start: Callable[..., Serve], router: str) -> None:
    serve = start(Serve, *FLAGS, "--router", router, workers=2)
    leave_first = occupy(serve, "a")
    eventually(lambda: max(loads(serve)) > 32, what="one worker is busy")
    busy = loads(serve).index(max(loads(serve)))
    eventually(lambda: _all_elsewhere(serve, busy), what="the frontend knows which")

    leave_second = occupy(serve, "b")
    eventually(lambda: min(loads(serve)) > 32, what="both are busy")
    eventually(lambda: answers(serve) == [529] * ASKED, what="the frontend knows it")

    leave_first()
    leave_second()
    eventually(lambda: answers(serve) == [200] * ASKED, what="both take requests again")
    serve.stop()


def _all_elsewhere(serve: Serve, busy: int) -> bool:
    before = serve.ended("completed", busy)
    assert answers(serve) == [200] * ASKED
    return serve.ended("completed", busy) == before
