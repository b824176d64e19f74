"""The real SGLang over two nodes, which are two workers on this machine: requests go to one, and it speaks for both."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.errors import EngineDead
from tests.e2e.harness import START_S, Cluster, Process, eventually, free_ports
from tests.real_sglang.engines import Bench, TestedEngine, shared_memory_of
from tests.real_sglang.hardware import SERVED, cores_of_ranks, needs_cpu, needs_two, tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), needs_two]

MODEL = "tiny"
TWO_NODES = ("--nnodes", "2", "--tp-size", "2")
TWO_CACHES = ("--attn-dp-size", "2")  # each node has a rank, with a cache of its own; else they split one
SETTINGS = {
    "BATON_START_TIMEOUT_S": "300",
    "BATON_CANARY_TIMEOUT_S": "60",
    "BATON_ROUTER": "kv",
    "OMP_NUM_THREADS": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": cores_of_ranks(),
}
FOLLOWER, LEADER = 0, 1
PORTS = 8  # the one to meet at, and those that SGLang counts from there
RESTART = 75
TELL_S = 2.0


class Nodes(Cluster):
    """A frontend and the two workers of one engine."""

    def __init__(self, directory: Path, model: Path, *more: str) -> None:
        self.meeting = f"127.0.0.1:{free_ports(PORTS)}"
        self.in_turn = more == TWO_CACHES
        arguments = ("--model", str(model), "--name", MODEL, *SERVED, *TWO_NODES, *more)
        super().__init__(directory, *arguments, engine="sglang", workers=2, settings=SETTINGS)

    def start_worker(self, number: int, *more: str) -> Process:
        """See `Cluster.start_worker`.

        Nodes with caches of their own count their ports from the same number, and SGLang looks whether these are free
        before it takes any: on one machine the leader, who takes them, has to come later.
        """
        rank = "1" if number == FOLLOWER else "0"
        process = super().start_worker(number, "--node-rank", rank, "--dist-init-addr", self.meeting, *more)
        if number == FOLLOWER and self.in_turn:
            eventually(
                lambda: len(psutil.Process(process.pid).children()) >= 2, self.start_timeout_s, "its own processes"
            )
        return process

    def wait_ready(self) -> None:
        """See `Cluster.wait_ready`."""
        for number in (FOLLOWER, LEADER):
            eventually(lambda n=number: self.health(n) == 200, self.start_timeout_s, f"worker {number} is ready")
        eventually(self.is_ready, START_S, "the model is listed")

    def family(self) -> list[psutil.Process]:
        """Return both workers, and the processes that they have started."""
        workers = [psutil.Process(process.pid) for process in self.processes]
        return [*workers, *(child for worker in workers for child in worker.children(recursive=True))]

    def leader_id(self) -> int:
        """Return the name by which requests are sent to one worker."""
        _, text = self.get("/health")
        (mine,) = [one for one in json.loads(text)["instances"] if one["endpoint"] == "generate"]
        return int(mine["instance_id"])


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def ask(nodes: Nodes, prompt: str, **extension: Any) -> int:
    """Have one token made; return how much of the prompt was cached."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "nvext": extension}
    status, text = nodes.post("/v1/completions", body)
    assert status == 200, text
    usage = json.loads(text)["usage"]
    assert usage["completion_tokens"] == 1
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def stop_one(nodes: Nodes, first: int) -> None:
    """Stop one node: it ends well, the other ends so that it is started again, and nothing of either is left."""
    family = nodes.family()
    nodes.processes[first].signal(signal.SIGTERM)
    assert nodes.processes[first].wait() == 0
    assert nodes.processes[1 - first].wait() == RESTART
    left = psutil.wait_procs(family, timeout=10)[1]
    assert not left, f"left behind: {left}"
    eventually(lambda: not nodes.is_ready(), START_S, "the model is gone")


def test_the_leader_answers_and_speaks_for_both_and_its_end_is_the_followers(
    start: Callable[..., Nodes], tmp_path: Path
) -> None:
    # SGLang's Llama does not bear a rank that has nothing to do; its Qwen does.
    nodes = start(Nodes, tiny_model(tmp_path, "qwen3", num_hidden_layers=2), *TWO_CACHES)
    assert nodes.instances() == 1
    assert "as a follower" in nodes.log_of("worker-0")
    status, text = nodes.system("/control/cache/clear", FOLLOWER, b"{}")
    assert status == 501
    assert "leader" in text
    here = nodes.leader_id()
    prompts = [f"{number} {time.monotonic_ns()} is where this begins, and the far node has it" for number in range(6)]
    assert [ask(nodes, prompt, backend_instance_id=here, dp_rank=1) for prompt in prompts] == [0] * 6
    time.sleep(TELL_S)
    # The follower alone can tell that rank 1 has them; who does not know it would send some of them to rank 0.
    assert [ask(nodes, prompt) for prompt in prompts] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    stop_one(nodes, LEADER)
    assert "cannot be heard" not in nodes.log_of("worker-1")


def test_the_end_of_the_follower_is_the_leaders(start: Callable[..., Nodes], tiny: Path) -> None:
    nodes = start(Nodes, tiny)
    prompt = "one cache, split between two nodes"
    assert [ask(nodes, prompt) for _ in range(2)] == [0, len(prompt) // 16 * 16]
    made = shared_memory_of(nodes.family())
    assert made
    stop_one(nodes, FOLLOWER)
    assert not [path for path in made if path.exists()]


@needs_cpu
def test_a_follower_whose_processes_die_as_it_starts_is_started_again(
    bench: Bench, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without cores for each rank SGLang's scheduler gives up; that says nothing about the arguments."""
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tiny.parent))

    async def body() -> None:
        meeting = f"127.0.0.1:{free_ports(PORTS)}"
        engine = TestedEngine(
            tiny, "null", "--tp-size", "2", "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", meeting
        )
        files = set(tiny.parent.iterdir())
        with pytest.raises(EngineDead):
            await engine.start()
        await engine.stop()
        assert set(tiny.parent.iterdir()) == files

    bench.run(body(), 120)
