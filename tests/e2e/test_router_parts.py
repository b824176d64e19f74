"""The global router over prefill and decode pools, and over workers that have caches of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("torch")

from tests.doubles.tiny_models import make_tiny_model
from tests.e2e.disagg import Reading
from tests.e2e.harness import Process, Serve, eventually
from tests.e2e.pooled import ROUTER, Pooled

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MODEL = "tiny"
CHAT = "/v1/chat/completions"
QUICK, BULK, FEW, MANY = 1, 2, 3, 4  # the workers of the pools, by their system ports
SETTINGS: dict[str, Any] = {"kv": {"handoff": "late"}, "torch": {"blocks": 512, "batch_tokens": 128}}
LONG = "".join(f"{number} bottles of beer on the wall, " for number in range(100))


def topology(model: str) -> dict[str, Any]:
    one = {"count": 1}
    return {
        "mode": "disaggregated",
        "settings": {"model": model, **SETTINGS},
        "retry": {"faster": True, "others": True},
        "prefill": {
            "pools": [{"name": "quick", "workers": one}, {"name": "bulk", "workers": one}],
            "axes": [
                {"name": "length", "min": 0, "max": 1000, "buckets": 2},
                {"name": "ttft_ms", "min": 0, "max": 1000, "buckets": 2},
            ],
            "mapping": [["quick", "quick"], ["quick", "bulk"]],
        },
        "decode": {
            "pools": [{"name": "few", "workers": one}, {"name": "many", "workers": one}],
            "axes": [
                {"name": "context", "min": 0, "max": 2000, "buckets": 2},
                {"name": "itl_ms", "min": 0, "max": 100, "buckets": 2},
            ],
            "mapping": [["few", "many"], ["few", "many"]],
        },
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / MODEL, seed=3))


@pytest.fixture(scope="module")
def pooled(start_shared: Callable[..., Pooled], model: str) -> Iterator[Pooled]:
    pooled = start_shared(Pooled, topology(model), workers=4)
    yield pooled
    pooled.stop()


def chat(prompt: str, tokens: int = 16, **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        **more,
    }


def say(system: Serve, prompt: str, tokens: int = 16, **router: float) -> str:
    extra = {"nvext": {"router": router}} if router else {}
    answer = system.client(strict=False).chat.completions.create(**chat(prompt, tokens), extra_body=extra)
    return answer.choices[0].message.content or ""


def sent(pooled: Pooled, before: dict[str, dict[str, int]] | None = None) -> dict[str, dict[str, int]]:
    """Return how many requests each pool got, or got more than `before`."""
    counts = {part: pooled.decisions(part) for part in ("prefill", "decode")}
    if before is None:
        return counts
    more = {
        part: {pool: count - before[part].get(pool, 0) for pool, count in pools.items()}
        for part, pools in counts.items()
    }
    return {part: {pool: count for pool, count in pools.items() if count} for part, pools in more.items()}


@pytest.mark.parametrize(
    ("prompt", "tokens", "router", "prefill", "decode"),
    [
        ("short", 16, {}, "quick", "many"),
        ("short", 16, {"itl_target": 0}, "quick", "few"),
        (LONG[:1500], 16, {"ttft_target": 900, "itl_target": 10}, "bulk", "few"),
        (LONG[:1500], 16, {"ttft_target": 100, "itl_target": 90}, "quick", "many"),
    ],
)
def test_targets_choose_the_pools_of_both_parts(
    pooled: Pooled, prompt: str, tokens: int, router: dict[str, float], prefill: str, decode: str
) -> None:
    before = sent(pooled)
    assert say(pooled, prompt, tokens, **router)
    assert sent(pooled, before) == {"prefill": {prefill: 1}, "decode": {decode: 1}}


@pytest.mark.slow
def test_what_is_said_does_not_depend_on_the_pools(pooled: Pooled, start: Callable[..., Serve], model: str) -> None:
    whole = start(Serve, "--model", model, "--torch-blocks", "512", engine="torch")
    for prompt in ("a", "What is the capital of Japan?", LONG[:700], LONG[:2000]):
        expected = say(whole, prompt)
        for ttft in (0, 1000):
            for itl in (0, 100):
                assert say(pooled, prompt, ttft_target=ttft, itl_target=itl) == expected
    whole.stop()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_d31_a_client_that_leaves_is_gone_from_every_worker(pooled: Pooled, phase: str) -> None:
    prompt, tokens = (LONG[:3000], 4) if phase == "prefill" else ("short", 3000)
    # The frontend keeps a late prefill going when its client leaves: what counts is that nothing is left.
    connections = [pooled.open(CHAT, chat(prompt, tokens, stream=True, ignore_eos=True)) for _ in range(4)]
    busy = (QUICK, BULK) if phase == "prefill" else (FEW, MANY)
    eventually(lambda: any(Reading(pooled, worker).held for worker in busy), what=f"it is in {phase}")
    for connection in connections:
        connection.close()
    for worker in (QUICK, BULK, FEW, MANY):
        eventually(lambda w=worker: not Reading(pooled, w).held, 20, f"nothing is left on worker {worker}")
    eventually(
        lambda: pooled.metric("baton_router_pool_requests_in_flight", ROUTER) == 0, what="the router forgets them"
    )


@pytest.mark.faults
def test_requests_go_on_when_a_pool_of_either_part_dies(start: Callable[..., Pooled], model: str) -> None:
    pooled = start(Pooled, topology(model), workers=4)
    expected = say(pooled, "What is the capital of Japan?", 24)

    deaths = {1.0: lambda: pooled.worker(QUICK).kill(), 1.5: lambda: pooled.worker(MANY).kill()}
    assert set(pooled.answers(chat("What is the capital of Japan?", 24), 60, 0.05, deaths)) == {expected}
    after = sent(pooled)
    assert after["prefill"].get("bulk", 0) > 0
    assert after["decode"].get("few", 0) > 0
    pooled.stop()


def test_within_a_pool_a_prompt_goes_where_its_beginning_is(start: Callable[..., Pooled]) -> None:
    pools = [{"name": "cached", "spread": "kv", "workers": {"count": 2}}]
    described = {"mode": "aggregated", "settings": {"engine": "echo"}, "aggregated": {"pools": pools}}
    pooled = start(Pooled, described, workers=2)

    def cached(prompt: str) -> int:
        answer = pooled.client().completions.create(model="echo", prompt=prompt, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    def served() -> list[float]:
        return [pooled.ended("completed", worker) for worker in (1, 2)]

    prompts: list[str] = []
    while len(prompts) < 6 or not all(served()):
        assert len(prompts) < 60, "a worker is left out"
        prompts.append(f"{len(prompts):03d} " * 100)
        assert cached(prompts[-1]) == 0
    for prompt in prompts:
        eventually(lambda prompt=prompt: cached(prompt + "and so on") >= 384, what="the prefix is found")
        before = served()
        assert [cached(prompt + ending) for ending in ("x", "y", "z")] == [400] * 3
        assert sorted(b - a for a, b in zip(before, served(), strict=True)) == [0, 3], "one worker took all three"
    pooled.stop()


def test_workers_that_a_pool_cannot_have_are_refused_before_anything_starts(tmp_path: Path, model: str) -> None:
    described = topology(model)
    described["decode"]["pools"][1]["workers"] = {"count": 1, "settings": {"torch": {"blocs": 3}}}
    file = tmp_path / "pools.yaml"
    file.write_text(yaml.safe_dump(described))
    process = Process(["serve", "--topology", str(file)], tmp_path / "out.log")
    assert process.wait() == 2
    assert "torch.blocs" in process.output.read_text()
    assert "decode pool many" in process.output.read_text()
