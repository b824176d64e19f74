"""Baton on the real SGLang, as a client sees it: one worker, a prefill and a decode worker, and the KV router."""

import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import LOAD_S, Process, Serve, System, eventually, fetch, free_ports
from tests.e2e.pooled import Pooled
from tests.real_sglang.hardware import EXACT, GROUP_BACKEND, HIDDEN, SERVED, slow_prompts, tiny_model
from tests.real_sglang.test_commands import LORA, write_lora

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MODEL = "tiny"
ONE = (*SERVED, *EXACT)
OVER_NIXL = (
    *("--disaggregation-transfer-backend", "nixl", "--chunked-prefill-size", "256"),
    *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
)
SPLIT = (*ONE, *OVER_NIXL)
STOP = {
    "BATON_START_TIMEOUT_S": "300",
    "BATON_CANARY_TIMEOUT_S": "60",
    "OMP_NUM_THREADS": "1",
    "BATON_SGLANG_GROUP_BACKEND": GROUP_BACKEND,
}
LONG = "".join(f"{number} bottles of beer on the wall, " for number in range(100))
PROMPTS = ["a", "0123456789abcdef", "0123456789abcdefg", "What is the capital of Japan?", LONG[:600], LONG[:2500]]
COMPLETIONS = "/v1/completions"
SEND_WEIGHTS = Path(__file__).parent / "send_weights.py"
ONE_POOL = {"pools": [{"name": "all", "workers": {"count": 1}}]}
POOLS = {"mode": "disaggregated", "prefill": ONE_POOL, "decode": ONE_POOL}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("models") / MODEL, seed=3))


@pytest.fixture(scope="module")
def whole(start_shared: Callable[..., Serve], model: str) -> Iterator[Serve]:
    """One worker that does everything."""
    serve = start_shared(Serve, "--model", model, "--router", "kv", *ONE, engine="sglang", settings=STOP)
    yield serve
    serve.stop()


@pytest.fixture(scope="class")  # so that few SGLangs run at the same time
def split(start_shared: Callable[..., Serve], model: str) -> Iterator[Serve]:
    """A prefill and a decode worker whose engines move KV by themselves."""
    serve = start_shared(Serve, "--model", model, *SPLIT, engine="sglang", prefill=1, decode=1, settings=STOP)
    yield serve
    serve.stop()


def complete(serve: Serve, prompt: str, **options: Any) -> Any:
    defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16}
    return serve.client(strict=False).completions.create(model=MODEL, prompt=prompt, **(defaults | options))


def asking(length: int, tokens: int = 4) -> dict[str, object]:
    """A request for a prompt that no other has begun like."""
    prompt = f"{time.monotonic_ns()} {LONG}"[:length].ljust(length, "x")
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0}


def quiet(serve: Serve, workers: tuple[int, ...] = (0, 1)) -> bool:
    return all(
        serve.metric("baton_requests_in_flight", n) == 0 == serve.metric("baton_engine_running_requests", n)
        for n in workers
    )


def assert_tenants_share_no_cached_prompt(serve: Serve) -> None:
    """A prompt that one tenant has cached is computed again for another, and found again by the first."""
    prompt = f"{time.monotonic_ns()} " + LONG[:400]

    def cached(salt: str | None) -> int:
        options = {} if salt is None else {"extra_body": {"cache_salt": salt}}
        return int(complete(serve, prompt, max_tokens=2, **options).usage.prompt_tokens_details.cached_tokens)

    for tenant in ("alice", "bob", None):
        assert cached(tenant) == 0, f"{tenant} is served what another tenant has cached"
        assert cached(tenant) >= len(prompt) // 16 * 16 - 16


class TestOneWorker:
    """A worker that does both prefill and decode."""

    def test_chat_and_its_usage(self, whole: Serve) -> None:
        answer = whole.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello!"}], max_tokens=7, temperature=0.0
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 7
        assert answer.choices[0].finish_reason == "length"

    def test_a_stream_is_the_whole_answer_in_pieces(self, whole: Serve) -> None:
        expected = complete(whole, "count: 1 2 3", max_tokens=40).choices[0].text
        parts = [part.choices[0].text for part in complete(whole, "count: 1 2 3", max_tokens=40, stream=True)]
        assert "".join(parts) == expected
        assert len(parts) > 1

    def test_choices_guides_and_log_probabilities(self, whole: Serve) -> None:
        # Chance may end an answer early, so ends are ignored.
        answer = complete(whole, "abc", n=3, temperature=1.0, logprobs=2, extra_body={"ignore_eos": True})
        assert sorted(choice.index for choice in answer.choices) == [0, 1, 2]
        assert all(len(choice.logprobs.token_logprobs) == 16 for choice in answer.choices)
        guided = complete(whole, "yes or no?", temperature=1.0, extra_body={"guided_choice": ["yes", "no"]})
        assert guided.choices[0].text in ("yes", "no")

    def test_a_prefix_is_reused_and_the_router_hears_of_it(self, whole: Serve) -> None:
        prompt = f"{time.monotonic_ns()} " + LONG[:400]
        assert complete(whole, prompt).usage.prompt_tokens_details.cached_tokens == 0
        again = complete(whole, prompt)
        assert again.usage.prompt_tokens_details.cached_tokens >= len(prompt) // 16 * 16 - 16

    def test_tenants_share_no_cached_prompt(self, whole: Serve) -> None:
        assert_tenants_share_no_cached_prompt(whole)

    @pytest.mark.parametrize(
        ("body", "words"),
        [({"prompt": "x" * 5000}, "context"), ({"max_tokens": 100_000}, "max_tokens"), ({"logprobs": 500}, "")],
    )
    def test_bad_input_is_refused_with_the_reason(self, whole: Serve, body: dict[str, Any], words: str) -> None:
        status, text = whole.post(COMPLETIONS, {"model": MODEL, "prompt": "x", "max_tokens": 4, **body})
        assert status == 400, text
        assert words in text

    @slow_prompts
    def test_d08_cancel_before_first_output(self, whole: Serve) -> None:
        """Long prompts; the clients leave before any has a token."""
        leave_during_prefill(whole, 0, "aggregated")
        eventually(lambda: whole.metric("baton_engine_running_requests") == 0, what="the engine is free")

    def test_the_engines_own_metrics_are_shown(self, whole: Serve) -> None:
        status, text = whole.system("/metrics")
        assert status == 200
        assert "sglang:" in text
        assert "baton_requests_total" in text

    def test_pause_and_continue(self, whole: Serve) -> None:
        assert execute(whole, "pause", {"mode": "keep"})["paused"] is True
        status, _ = whole.post(COMPLETIONS, asking(20))
        assert status in (404, 503)
        execute(whole, "continue", {})
        eventually(lambda: whole.post(COMPLETIONS, asking(20))[0] == 200, what="it serves again")

    def test_weights_are_replaced_and_a_wrong_shape_is_refused(
        self, whole: Serve, model: str, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        directory = tmp_path_factory.mktemp("weights")
        other = tiny_model(directory / "other", seed=9)
        wrong = tiny_model(directory / "wrong", seed=9, hidden_size=96)
        before = complete(whole, "once upon a time").choices[0].text
        status, text = order(whole, "weights/update", {"source": {"type": "disk", "path": str(wrong)}, "version": "x"})
        assert status == 400, text
        assert complete(whole, "once upon a time").choices[0].text == before, "old weights keep serving"
        execute(whole, "weights/update", {"source": {"type": "disk", "path": str(other)}, "version": "v2"})
        assert complete(whole, "once upon a time").choices[0].text != before
        assert execute(whole, "status")["weight_version"] == "v2"
        execute(whole, "weights/update", {"source": {"type": "disk", "path": model}, "version": "v1"})
        assert complete(whole, "once upon a time").choices[0].text == before


class TestPrefillAndDecode:
    """Engines that hand KV to each other over NIXL."""

    @pytest.mark.parametrize("prompt", PROMPTS, ids=len)
    def test_the_answer_is_the_same(self, whole: Serve, split: Serve, prompt: str) -> None:
        expected = complete(whole, prompt).choices[0].text
        done = split.metric("baton_rooms_ended_total", 0, outcome="done")
        assert complete(split, prompt).choices[0].text == expected
        assert complete(split, prompt).choices[0].text == expected, "with both caches warm"
        eventually(
            lambda: split.metric("baton_rooms_ended_total", 0, outcome="done") == done + 2, what="both rooms are done"
        )

    def test_tenants_share_no_cached_prompt(self, split: Serve) -> None:
        assert_tenants_share_no_cached_prompt(split)

    @slow_prompts
    def test_a_client_that_leaves_during_prefill_frees_both(self, split: Serve) -> None:
        leave_during_prefill(split, 1)
        eventually(lambda: quiet(split), 60, "both engines are free")
        assert split.post(COMPLETIONS, asking(20))[0] == 200

    @slow_prompts
    def test_d15_a_decode_does_not_wait_for_a_prefill_that_is_gone(self, split: Serve) -> None:
        """The prefill worker is frozen: rooms fall silent, and decode says so long before any timeout of SGLang."""
        worker = split.worker(0)
        family = [worker, *worker.children(recursive=True)]
        connections = [split.open(COMPLETIONS, asking(4000, 16)) for _ in range(6)]  # some of them wait for seconds
        eventually(lambda: split.metric("baton_requests_in_flight", 1) >= 1, what="decode has one")
        for process in family:
            process.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: split.metric("baton_requests_in_flight", 1) == 0, 30, "decode has given up")
        finally:
            for process in family:
                process.send_signal(signal.SIGCONT)
            for connection in connections:
                connection.close()
        eventually(lambda: split.post(COMPLETIONS, asking(20))[0] == 200, 120, "it serves again")


def leave_during_prefill(system: System, worker: int, role: str = "decode") -> None:
    """Leave requests while their prompts are computed, and once more where they had ended before that was seen."""
    count = 3

    def ended() -> float:
        return sum(system.ended(state, worker, role) for state in ("completed", "cancelled"))

    for _ in range(5):
        before, cancelled = ended(), system.ended("cancelled", worker, role)
        connections = [system.open(COMPLETIONS, asking(4000, 16)) for _ in range(count)]
        eventually(
            lambda seen=before: ended() - seen + system.metric("baton_requests_in_flight", worker) >= count,
            60,
            "all are in the worker, or have ended",
        )
        for connection in connections:
            connection.close()
        eventually(lambda seen=before: ended() - seen == count, 60, "all have ended")
        if system.ended("cancelled", worker, role) > cancelled:
            return
    raise AssertionError("five times all requests were completed before their clients left")


@pytest.fixture(scope="class")
def pools(start_shared: Callable[..., Pooled], model: str) -> Iterator[Pooled]:
    """A router, a prefill pool and a decode pool: the frontend knows no worker, so prefill chooses the room."""
    limits = ("--start-timeout-s", "300", "--canary-timeout-s", "60")
    arguments = ("--engine", "sglang", "--model", model, *limits, *SPLIT)
    pooled = start_shared(Pooled, POOLS, workers=2, arguments=arguments)
    yield pooled
    pooled.stop()


class TestPools:
    """A prefill pool and a decode pool behind the global router."""

    @pytest.mark.parametrize("prompt", PROMPTS, ids=len)
    def test_the_answer_is_the_same(self, whole: Serve, pools: Pooled, prompt: str) -> None:
        expected = complete(whole, prompt).choices[0].text
        done = pools.metric("baton_rooms_ended_total", 1, outcome="done")
        assert complete(pools, prompt).choices[0].text == expected
        eventually(
            lambda: pools.metric("baton_rooms_ended_total", 1, outcome="done") == done + 1, what="the room is done"
        )

    @slow_prompts
    def test_a_client_that_leaves_during_prefill_frees_both(self, pools: Pooled) -> None:
        leave_during_prefill(pools, 2)
        eventually(lambda: quiet(pools, (1, 2)), 60, "both engines are free")
        assert pools.post(COMPLETIONS, asking(20))[0] == 200


@pytest.fixture(scope="class")
def two(start_shared: Callable[..., Serve], model: str) -> Iterator[Serve]:
    """Two workers, and a router that knows what each of them has in its cache."""
    flags = ("--model", model, "--router", "kv", *SERVED, *LORA)
    settings = {**STOP, "BATON_STALL_TIMEOUT_S": "10"}
    serve = start_shared(Serve, *flags, engine="sglang", workers=2, settings=settings)
    yield serve
    serve.stop()


class TestTwoWorkers:
    """One worker takes over from the other."""

    def test_a_prompt_goes_where_its_beginning_is(self, two: Serve) -> None:
        def cached(prompt: str) -> int:
            return int(complete(two, prompt, max_tokens=2).usage.prompt_tokens_details.cached_tokens)

        def served() -> list[float]:
            return [two.ended("completed", worker) for worker in (0, 1)]

        prompts: list[str] = []
        while len(prompts) < 3 or not all(served()):
            assert len(prompts) < 40, "a worker is left out"
            prompts.append(f"{len(prompts):03d} " * 100)
            assert cached(prompts[-1]) == 0
        for prompt in prompts[-3:]:
            eventually(lambda prompt=prompt: cached(prompt + "and so on") >= 384, 30, "the prefix is found")
            before = served()
            assert all(cached(prompt + ending) >= 384 for ending in ("x", "y", "z"))
            taken = sorted(now - then for then, now in zip(before, served(), strict=True))
            assert taken == [0, 3], "one worker took all three"

    def test_an_adapter_is_a_model_while_it_is_loaded(self, two: Serve, tmp_path: Path) -> None:
        def answer(model: str) -> str:
            made = two.client(strict=False).completions.create(
                model=model, prompt="abc", temperature=0.0, max_tokens=12
            )
            return str(made.choices[0].text)

        def models() -> set[str]:
            return {model.id for model in two.client().models.list()}

        adapter = {"name": "fine", "path": str(write_lora(tmp_path / "fine"))}
        plain = answer(MODEL)
        assert execute(two, "lora/load", adapter)["adapters"] == ["fine"]
        eventually(lambda: models() == {MODEL, "fine"}, what="the adapter is listed")
        tuned = {answer("fine") for _ in range(4)}
        assert len(tuned) == 1, "only the worker that has the adapter is asked"
        assert tuned != {plain}
        assert {answer(MODEL) for _ in range(4)} == {plain}
        status, text = order(two, "lora/load", {**adapter, "name": MODEL})
        assert (status, "name of the model" in text) == (400, True), text
        execute(two, "lora/unload", {"name": "fine"})
        eventually(lambda: models() == {MODEL}, what="the adapter is no longer listed")
        assert two.post(COMPLETIONS, {**asking(20), "model": "fine"})[0] == 404
        assert execute(two, "lora/list")["adapters"] == []

    def test_a_frozen_scheduler_is_replaced_and_its_requests_move(self, two: Serve) -> None:
        """Only SGLang's scheduler is frozen: the worker itself still answers and sends heartbeats."""
        worker = two.worker(0)
        [scheduler] = [child for child in worker.children(recursive=True) if "scheduler" in " ".join(child.cmdline())]
        bodies = [{**asking(30 + number, 2000), "ignore_eos": True} for number in range(6)]
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = pool.map(lambda body: two.post(COMPLETIONS, body), bodies)
            # A request that is alone in an engine that dies may be the cause, and is not moved.
            eventually(lambda: two.metric("baton_requests_in_flight") >= 2, what="the first worker has some")
            scheduler.send_signal(signal.SIGSTOP)
            for status, text in answers:
                assert status == 200, text
                assert json.loads(text)["usage"]["completion_tokens"] == 2000
        assert re.search("no step for|has been stopped for", two.log_of("worker-0"))
        eventually(lambda: not scheduler.is_running(), 30, "the frozen scheduler is gone")
        eventually(lambda: two.health(0) == 200 and two.worker(0).pid != worker.pid, LOAD_S, "another worker serves")

    def test_a_trainer_that_goes_silent_costs_a_restart_and_no_later_update(
        self, two: Serve, model: str, tmp_path: Path
    ) -> None:
        port, worker = free_ports(1), two.worker(1)
        name, shape = "model.norm.weight", [HIDDEN]
        trainer = Process(
            [str(SEND_WEIGHTS), GROUP_BACKEND, str(port), name], tmp_path / "trainer.log", program=sys.executable
        )
        try:
            group = {"group": "trainer", "host": "127.0.0.1", "port": port, "rank": 1, "size": 2, "timeout_s": 60}
            assert order(two, "weights/group/join", group, 1)[0] == 200
            tensors = [{"name": name, "dtype": "float32", "shape": shape}]
            silent = {"type": "group", "group": "trainer", "timeout_s": 2, "tensors": tensors}
            status, text = order(two, "weights/update", {"source": silent, "version": "never"}, 1)
            assert (status, "restarts" in text) == (503, True), text
        finally:
            trainer.kill()
        eventually(lambda: two.health(1) == 200 and two.worker(1).pid != worker.pid, LOAD_S, "another worker serves")
        status, text = order(two, "weights/update", {"source": {"type": "disk", "path": model}, "version": "next"}, 1)
        assert status == 200, text


def order(serve: Serve, command: str, body: dict[str, Any] | None, worker: int = 0) -> tuple[int, str]:
    url = f"http://127.0.0.1:{serve.system_ports[worker]}/control/{command}"
    return fetch(url, None if body is None else json.dumps(body).encode())


def execute(serve: Serve, command: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    status, text = order(serve, command, body)
    assert status == 200, text
    answer: dict[str, Any] = json.loads(text)
    return answer
