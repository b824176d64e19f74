"""SGLang on a GPU with FlashAttention 3 and CUDA graphs, as a client and an operator see it.

Memory that is released is measured in memory of the GPU. Other modules of this directory run on a GPU too, with small
engines; here is what only a GPU has.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Process, Serve, eventually
from tests.real_sglang.hardware import FLASH, GRAPHS, HARDWARE, needs_gpu, tiny_model
from tests.real_sglang.moe_model import EXPERTS, LAYERS, make_moe_model
from tests.real_sglang.test_serving import MODEL, STOP, asking, complete, execute, order

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), needs_gpu]

LEND_WEIGHTS = Path(__file__).parent / "lend_weights.py"
# 200 MiB of weights, and 2 GiB of KV for TOKENS.
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "head_dim": 128,
    "initializer_range": 0.05,
}
TOKENS = "524288"
FAST = (*HARDWARE, *GRAPHS, *FLASH)
KV_MIB, WEIGHTS_MIB = 2048, 200
FREED = 0.9
REGISTERED_S = 30
SAVER = ("--enable-memory-saver", "--enable-weights-cpu-backup", "--max-total-tokens", TOKENS)
SPLIT = ("--disaggregation-transfer-backend", "nixl", "--disaggregation-decode-retraction-backup", "cpu_tensor")
SMALL = ("--max-total-tokens", "16384")
PROMPT = "once upon a time"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / MODEL, **SHAPE)


@pytest.fixture(scope="module")
def serve(start_shared: Callable[..., Serve], model: Path) -> Iterator[Serve]:
    """One worker whose memory can be released."""
    serve = start_shared(Serve, "--model", str(model), "--", *FAST, *SAVER, engine="sglang", settings=STOP)
    yield serve
    serve.stop()


def used_mib(serve: Serve) -> int:
    from tests.real_sglang.gpu_memory import gpu_mib

    worker = serve.worker(0)
    return gpu_mib([worker, *worker.children(recursive=True)])


def text(serve: Serve, **options: Any) -> str:
    return str(complete(serve, PROMPT, **options).choices[0].text)


def text_again(serve: Serve) -> str:
    """Return the text when the worker is registered again."""
    eventually(lambda: serve.post("/v1/completions", asking(20))[0] == 200, REGISTERED_S, "it serves again")
    return text(serve)


@pytest.mark.parametrize(
    ("tags", "mib"),
    [(["kv_cache"], KV_MIB), (["weights"], WEIGHTS_MIB), ([], KV_MIB + WEIGHTS_MIB)],
    ids=["kv_cache", "weights", "all"],
)
def test_memory_of_a_tag_leaves_the_gpu_and_comes_back(serve: Serve, tags: list[str], mib: int) -> None:
    before, full = text(serve), used_mib(serve)
    execute(serve, "memory/release", {"tags": tags})
    low = used_mib(serve)
    execute(serve, "memory/resume", {"tags": tags})
    again = used_mib(serve)
    print(f"{tags or 'all'}: {full} MiB, released {low} MiB, resumed {again} MiB")
    assert full - low >= FREED * mib
    assert again - low >= FREED * mib
    assert text_again(serve) == before


def test_tags_come_back_one_by_one_and_requests_wait_for_the_last(serve: Serve) -> None:
    before, full = text(serve), used_mib(serve)
    execute(serve, "memory/release", {"tags": []})
    execute(serve, "memory/resume", {"tags": ["weights"]})
    middle = used_mib(serve)
    assert full - middle >= FREED * KV_MIB, "the KV is still released"
    assert serve.post("/v1/completions", asking(20))[0] in (404, 503)
    execute(serve, "memory/resume", {"tags": ["kv_cache"]})
    assert serve.post("/v1/completions", asking(20))[0] in (404, 503), "the CUDA graphs are a tag too"
    execute(serve, "memory/resume", {"tags": ["cuda_graph"]})
    assert text_again(serve) == before


def test_requests_that_run_while_memory_is_released_end_after_it_has_come_back(serve: Serve) -> None:
    bodies = [{**asking(30 + number, 1500), "ignore_eos": True} for number in range(6)]
    before, full = text_again(serve), used_mib(serve)
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = pool.map(lambda body: serve.post("/v1/completions", body), bodies)
        eventually(lambda: serve.metric("baton_engine_running_requests") >= 6, what="all run")
        execute(serve, "memory/release", {"tags": []})
        assert full - used_mib(serve) >= FREED * (KV_MIB + WEIGHTS_MIB)
        assert serve.metric("baton_requests_in_flight") == 6, "they wait"
        execute(serve, "memory/resume", {"tags": []})
        for status, answer in answers:
            assert status == 200, answer
            assert json.loads(answer)["usage"]["completion_tokens"] == 1500
    assert text_again(serve) == before
    serve.assert_quiet()


def test_weights_come_over_cuda_ipc(serve: Serve, model: Path, tmp_path: Path) -> None:
    before = text_again(serve)
    other = tiny_model(tmp_path / "other", seed=9, **SHAPE)
    socket = f"ipc://{tmp_path}/weights"
    command = [sys.executable, str(LEND_WEIGHTS), str(other), "lm_head.weight", socket]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        gpu = trainer.stdout.readline().strip()
        execute(serve, "weights/update", {"source": {"type": "ipc", "handles": {gpu: socket}}, "version": "lent"})
        assert trainer.wait(30) == 0
    assert text(serve) != before
    assert execute(serve, "status")["weight_version"] == "lent"
    execute(serve, "weights/update", {"source": {"type": "disk", "path": str(model)}, "version": "first"})
    assert text(serve) == before


def test_prefill_and_decode_workers_give_the_answers_of_one(start: Callable[..., Serve], model: Path) -> None:
    """Whole prompts, so that both compute them in one pass: in bfloat16 another division rounds otherwise."""
    whole = start(Serve, "--model", str(model), "--", *FAST, *SMALL, engine="sglang", settings=STOP)
    prompts = [PROMPT, "What is the capital of Japan?", "0123456789" * 30]
    expected = [str(complete(whole, prompt, max_tokens=24).choices[0].text) for prompt in prompts]
    whole.stop()
    options = ("--model", str(model), "--", *FAST, *SPLIT, *SMALL)
    split = start(Serve, *options, engine="sglang", prefill=1, decode=1, settings=STOP)
    done = split.metric("baton_rooms_ended_total", 0, outcome="done")
    assert [str(complete(split, prompt, max_tokens=24).choices[0].text) for prompt in prompts] == expected
    eventually(
        lambda: split.metric("baton_rooms_ended_total", 0, outcome="done") >= done + len(prompts), what="rooms are done"
    )
    bodies = [{**asking(100 + number, 200), "ignore_eos": True} for number in range(32)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        for status, answer in pool.map(lambda body: split.post("/v1/completions", body), bodies):
            assert status == 200, answer
            assert json.loads(answer)["usage"]["completion_tokens"] == 200
    connection = split.open("/v1/completions", {**asking(100, 3000), "ignore_eos": True})
    eventually(lambda: split.metric("baton_engine_running_requests", 1) == 1, what="it decodes")
    connection.close()
    eventually(lambda: not any(any(split.load(worker).values()) for worker in (0, 1)), 30, "both are free")
    split.stop()


def test_a_mixture_of_experts_serves_and_its_traffic_is_recorded_and_planned(
    start: Callable[..., Serve], tmp_path: Path
) -> None:
    model = make_moe_model(tmp_path / MODEL)
    settings = {**STOP, "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(tmp_path)}
    options = (
        "--model",
        str(model),
        "--experts-recorder",
        "stat",
        "--",
        *HARDWARE,
        *GRAPHS,
        *SMALL,
    )
    serve = start(Serve, *options, engine="sglang", settings=settings)
    before = text(serve)
    execute(serve, "experts/record/start", {})
    assert text(serve, max_tokens=64)[: len(before)] == before
    dump = execute(serve, "experts/record/dump", {})["path"]
    status, reply = order(serve, "experts/record/stop", {})
    assert status == 200, reply
    layout = tmp_path / "layout.json"
    planned = Process.command(["experts", "plan", dump, "--ranks", "2", "--redundant", "2", "--out", str(layout)])
    done = subprocess.run(planned, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = json.loads(layout.read_text())["physical_to_logical_map"]
    assert [len(row) for row in rows] == [EXPERTS + 2] * LAYERS
    serve.stop()
