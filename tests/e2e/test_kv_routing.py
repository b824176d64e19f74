"""KV-aware routing: a prompt goes to the worker that has its beginning in the cache."""

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.harness import Serve, eventually

pytestmark = [pytest.mark.e2e]

WORKERS = 2
PROMPTS = 6
MOST_PROMPTS = 60  # of which one is bound to go to each worker


@pytest.fixture(scope="module")
def routed(start_shared: Callable[..., Serve]) -> Iterator[Serve]:
    serve = start_shared(Serve, "--router", "kv", workers=WORKERS)
    yield serve
    serve.stop()


def cached(serve: Serve, prompt: str) -> int:
    answer = serve.client().completions.create(model="echo", prompt=prompt, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def served(serve: Serve) -> list[float]:
    return [serve.ended("completed", worker) for worker in range(WORKERS)]


def spread_prompts(serve: Serve) -> list[str]:
    """Return prompts that are new to all workers and were sent, until every worker has got one."""
    prompts: list[str] = []
    while len(prompts) < PROMPTS or not all(served(serve)):
        assert len(prompts) < MOST_PROMPTS, "a worker is left out"
        prompts.append(f"{len(prompts):03d} " * 100)
        assert cached(serve, prompts[-1]) == 0
    return prompts


def test_no_process_listens_for_other_hosts_when_events_are_published(routed: Serve) -> None:
    cached(routed, "publish something")
    routed.assert_unexposed()


def test_a_prompt_goes_where_its_beginning_is(routed: Serve) -> None:
    prompts = spread_prompts(routed)
    # The router hears of blocks a moment after they are there.
    for prompt in prompts:
        eventually(lambda prompt=prompt: cached(routed, prompt + "and so on") >= 384, what="the prefix is found")
    for prompt in prompts:
        before = served(routed)
        assert [cached(routed, prompt + ending) for ending in ("x", "y", "z")] == [400 // 16 * 16] * 3
        after = served(routed)
        assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0, 3], "one worker took all three"


def test_a_frontend_that_starts_again_learns_what_the_workers_hold(routed: Serve) -> None:
    prompt = "a frontend forgets, its workers do not; " * 10
    cached(routed, prompt)
    eventually(lambda: cached(routed, prompt + "again") >= 384, what="the prefix is found")
    gone = routed.frontend()
    gone.kill()
    gone.wait(10)
    eventually(routed.is_ready, 30, "a new frontend answers")
    eventually(lambda: routed.instances() == WORKERS, 30, "it knows every worker")
    eventually(lambda: cached(routed, prompt + "later") >= 384, what="the prefix is found again")
    before = served(routed)
    assert all(cached(routed, prompt + ending) >= 384 for ending in "xyz")
    assert sorted(b - a for a, b in zip(before, served(routed), strict=True)) == [0, 3]
