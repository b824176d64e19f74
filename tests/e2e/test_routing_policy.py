"""The routing policy of examples/routing_policy.py, in front of real workers."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.harness import Process, Serve, eventually, fetch, free_ports

pytestmark = [pytest.mark.e2e]

GATEWAY = Path(__file__).parents[2] / "examples" / "routing_policy.py"
USERS = [f"user-{number}" for number in range(12)]


@pytest.fixture(scope="module")
def serve(start_shared: Callable[..., Serve]) -> Iterator[Serve]:
    started: Serve = start_shared(Serve, "--router", "direct", workers=2)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def gateway(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_ports(1)
    arguments = [str(GATEWAY), "--listen", str(port), "--endpoint", serve.url]
    process = Process(arguments, tmp_path_factory.mktemp("gateway") / "gateway.log", program=sys.executable)
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: fetch(f"{url}/live")[0] == 200, 30, "the gateway answers")
        yield url
        process.signal(signal.SIGINT)
        assert process.wait() == 0
    finally:
        process.kill()


def worker_of(url: str, user: str) -> int:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=30, max_retries=0)
    answer = client.completions.create(
        model="echo", prompt="where?", max_tokens=2, user=user, extra_body={"nvext": {"extra_fields": ["worker_id"]}}
    )
    extensions: Any = answer.model_extra
    return int(extensions["nvext"]["worker_id"]["decode_worker_id"])


def test_a_user_stays_on_one_worker_and_users_are_divided_over_all(gateway: str) -> None:
    first = [worker_of(gateway, user) for user in USERS]
    assert first == [worker_of(gateway, user) for user in USERS]
    assert len(set(first)) == 2


def test_an_answer_is_streamed_and_a_client_that_leaves_cancels_it(serve: Serve, gateway: str) -> None:
    client = openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", timeout=30, max_retries=0)
    stream = client.completions.create(model="echo", prompt="on and on", max_tokens=500_000, stream=True, user="a")
    next(iter(stream))
    stream.close()
    serve.assert_quiet()


def test_errors_of_the_endpoint_reach_the_client(gateway: str) -> None:
    status, text = fetch(f"{gateway}/v1/completions", b"{}")
    assert status == 400
    assert "model" in text


@pytest.mark.faults
def test_only_users_of_a_worker_that_has_gone_move(serve: Serve, gateway: str) -> None:
    before = {user: worker_of(gateway, user) for user in USERS}
    serve.worker(0).kill()

    def moved() -> dict[str, int]:
        try:
            return {user: worker_of(gateway, user) for user in USERS}
        except openai.APIStatusError:  # the worker is still listed
            return {}

    after = eventually(
        lambda: (found := moved()) and set(found.values()) != set(before.values()) and found, 60, "another worker"
    )
    kept = set(before.values()) & set(after.values())
    assert [user for user in USERS if before[user] in kept and after[user] == before[user]], "the others stay"
