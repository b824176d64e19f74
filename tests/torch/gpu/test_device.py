"""What only a real GPU shows: bfloat16 beside transformers, long contexts, graphs beside eager steps, memory that is
released, and a machine that cannot compile kernels."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
import transformers

from baton.config.engines import TorchOptions
from baton.engine_kit.cuda.driver import CudaError
from baton.engine_kit.cuda.regions import region_at
from baton.engines.torch.arena import find_device
from baton.engines.torch.core import Core
from baton.engines.torch.runner import Runner
from baton.engines.torch.sampling_params import make_sampling_params
from baton.engines.torch.sequence import Sequence
from baton.errors import ConfigError
from baton.models.defaults import SamplingDefaults
from baton.ports.engine import Work
from baton.protocol.commands import ReleaseMemory, ResumeMemory
from baton.protocol.ids import RequestId
from baton.protocol.requests import OutputOptions, Sampling, StopConditions
from baton.testing import run_bounded
from tests.doubles.tiny_models import make_tiny_model
from tests.torch.torch_sessions import session

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(300),
]

# Wide enough for the tiles that a large model uses.
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
CONTEXT = 33_000


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("wide"), "qwen3", **WIDE, max_position_embeddings=CONTEXT, initializer_range=0.05
    )


def work(name: str, prompt: list[int], tokens: int, **sampling: object) -> Work:
    return Work(
        request_id=RequestId(name),
        token_ids=tuple(prompt),
        max_tokens=tokens,
        stop=StopConditions(ignore_eos=True),
        sampling=Sampling(**(sampling or {"temperature": 0.0})),
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(directory: Path, works: list[Work], kernels: bool | None = None, **options: object) -> dict[str, list[int]]:
    """Return the tokens of each work."""
    settings: dict[str, object] = {"device": "cuda", "dtype": "float32", "blocks": 6000, "context": CONTEXT}
    chosen = TorchOptions(**(settings | {"max_running": 8} | options))
    core = Core(Runner(chosen, directory, lambda done, total: None, kernels=kernels), chosen)
    for number, one in enumerate(works):
        core.add([Sequence(one, 0, make_sampling_params(one, SamplingDefaults(), 300), number)])
    tokens: dict[str, list[int]] = {str(one.request_id): [] for one in works}
    while core.busy:
        core.step()
        if (result := core.take_result()) is not None:
            assert not result.failed
            for sampled in result.sampled:
                tokens[str(sampled.request_id)].append(sampled.token)
    assert core.scheduler.pool.used == 0
    core.close()
    return tokens


def reference(directory: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa").cuda()


def test_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(wide: Path) -> None:
    prompts = [prompt_of(length, length) for length in (33, 700, 2000)]
    exact, rounded = (reference(wide, dtype) for dtype in (torch.float32, torch.bfloat16))

    async def scores() -> list[list[float]]:
        found = []
        async with session(wide, dtype="bfloat16", device="cuda", context=4096, blocks=600, batch_tokens=512) as here:
            for number, prompt in enumerate(prompts):
                asked = Work(
                    request_id=RequestId(f"s{number}"),
                    token_ids=tuple(prompt),
                    max_tokens=1,
                    sampling=Sampling(temperature=0.0),
                    output=OutputOptions(prompt_logprobs=0),
                )
                stream = here.engine.submit(asked)
                scored: list[float] = []
                while outputs := await stream.read():
                    for output in outputs:
                        if (logprobs := getattr(output, "logprobs", None)) is not None and len(logprobs.chosen) > 1:
                            scored = list(logprobs.chosen)
                found.append(scored)
        return found

    for prompt, ours in zip(prompts, run_bounded(scores(), 120), strict=True):
        tokens = torch.tensor([prompt], device="cuda")
        with torch.no_grad():
            wanted, theirs = (
                torch.log_softmax(model(tokens).logits[0, :-1].float(), -1).gather(1, tokens[0, 1:, None])[:, 0].cpu()
                for model in (exact, rounded)
            )
        assert len(ours) == len(prompt) - 1
        error, usual = (torch.tensor(ours) - wanted).abs(), (theirs - wanted).abs()
        assert error.mean() <= 1.3 * usual.mean() + 1e-3
        assert error.max() <= 2 * usual.max() + 1e-2


@pytest.mark.parametrize("length", [8_190, 32_000])
def test_long_contexts_have_the_tokens_of_transformers(wide: Path, length: int) -> None:
    """Computed in chunks, then from the prefix cache with another end."""
    prompt = prompt_of(length)
    other = [*prompt[: length // 2], *prompt_of(50, 1)]
    prompts = {"whole": prompt, "again": prompt, "other": other}
    works = [work(name, tokens, 12) for name, tokens in prompts.items()]
    found = run(wide, works, batch_tokens=3000, max_running=1)
    model = reference(wide, torch.float32)
    for name, tokens in prompts.items():
        # One pass, which says what comes after each token: `generate` of transformers 5.22 differs from it.
        inputs = torch.tensor([[*tokens, *found[name][:-1]]], device="cuda")
        with torch.no_grad():
            best = model(inputs, logits_to_keep=12).logits[0].argmax(-1)
        assert found[name] == best.tolist(), name


def test_graphs_and_eager_steps_agree(wide: Path) -> None:
    """Decodes beside a prompt are computed eagerly, others from graphs."""
    decodes = [work(f"d{number}", prompt_of(20 + 30 * number, number), 40) for number in range(5)]
    sampled = [work(f"s{number}", prompt_of(10, number), 40, temperature=0.8, seed=number) for number in range(2)]
    alone = run(wide, [*decodes, *sampled], batch_tokens=2000)
    beside = run(wide, [*decodes, *sampled, work("long", prompt_of(3000, 9), 2)], batch_tokens=60)
    assert {name: tokens for name, tokens in beside.items() if name != "long"} == alone
    assert run(wide, [*decodes, *sampled], kernels=False, batch_tokens=2000) == alone


def test_released_memory_comes_back_at_its_address_with_its_graphs(wide: Path) -> None:
    async def body() -> None:
        async with session(wide, device="cuda", blocks=4000) as here:
            before = await here.generate(tokens=40)
            kv = here.info.kv
            assert kv is not None
            region = region_at(kv.address)
            assert region is not None
            for tags in (("kv_cache",), ("weights",), ("kv_cache", "weights")):
                await here.execute(ReleaseMemory(tags=tags))
                if "kv_cache" in tags:
                    with pytest.raises(CudaError, match="released"), region.in_use():
                        pass
                await here.execute(ResumeMemory(tags=tags))
                assert await here.generate(tokens=40) == before
            assert kv == here.info.kv

    run_bounded(body(), 120)


def test_the_memory_of_an_engine_is_given_back_when_it_stops(wide: Path) -> None:
    async def one() -> int:
        async with session(wide, device="cuda", blocks=8000) as here:
            await here.generate()
            assert here.info.kv is not None
            assert region_at(here.info.kv.address) is not None
            return here.info.kv.address

    address = run_bounded(one(), 60)
    gc.collect()
    assert region_at(address) is None


def test_devices_are_chosen_by_number(wide: Path) -> None:
    works = [work("one", prompt_of(50), 10)]
    assert run(wide, works, device="cuda:0") == run(wide, works)
    with pytest.raises(ConfigError, match="no device cuda:64"):
        find_device("cuda:64")


def test_a_machine_that_cannot_compile_kernels_computes_with_torch(wide: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import torch; torch.set_grad_enabled(False)\n"
        "from tests.torch.gpu.test_device import prompt_of, run, work\n"
        f"print(run(Path({str(wide)!r}), [work('one', prompt_of(50), 10)])['one'])"
    )
    compiler = {"CC": "/bin/false", "TRITON_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | compiler, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch computes instead" in done.stderr
    assert done.stdout.strip() == str(run(wide, [work("one", prompt_of(50), 10)])["one"])
