"""The built-in engine generates exactly what transformers does: greedy, float32, for every model family."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from baton.config.engines import TorchOptions
from baton.engines.torch.engine import TorchEngine
from baton.ports.engine import Work
from baton.protocol.ids import new_request_id
from baton.protocol.outputs import Finished, Logprobs, PromptScored, TokenDelta
from baton.protocol.requests import OutputOptions, Sampling, StopConditions
from baton.testing.bounded import run_bounded
from baton.testing.fakes import running
from tests.doubles.tiny_models import make_tiny_model

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True}),
    "llama-odd": ("llama", {"vocab_size": 301, "head_dim": 18, "intermediate_size": 50, "hidden_size": 42}),
    "llama-rope3": (
        "llama",
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32, "rope_theta": 5e5}},
    ),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": {**YARN, "rope_theta": 1e4}, "max_position_embeddings": 256}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3-moe-odd": (
        "qwen3_moe",
        {
            "hidden_size": 42,
            "moe_intermediate_size": 19,
            "num_experts": 7,
            "num_hidden_layers": 4,
            "mlp_only_layers": [2],
        },
    ),
    "qwen2-moe": ("qwen2_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
}
TOKENS = 24


class Reference:
    """transformers' answers, one prompt at a time and each computed once."""

    def __init__(self, directory: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.model.generation_config.eos_token_id = None
        if hasattr(self.model.config, "num_experts"):
            self.model.set_experts_implementation("eager")  # the plain loop; others refuse odd widths
        self._tokens: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, prompt: tuple[int, ...]) -> list[int]:
        if prompt not in self._tokens:
            inputs = torch.tensor([list(prompt)])
            out = self.model.generate(inputs, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
            self._tokens[prompt] = [int(token) for token in out[0, len(prompt) :]]
        return self._tokens[prompt]

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return log-probabilities [len(tokens), vocabulary] of what comes after each token."""
        with torch.no_grad():
            return torch.log_softmax(self.model(torch.tensor([list(tokens)])).logits[0].float(), dim=-1)


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    family, changes = MODELS[request.param]
    directory = make_tiny_model(tmp_path_factory.mktemp(request.param), family, **changes)
    return directory, Reference(directory)


def prompts(count: int, shortest: int = 3, longest: int = 70) -> list[tuple[int, ...]]:
    numbers = torch.Generator().manual_seed(count)
    lengths = torch.randint(shortest, longest, (count,), generator=numbers).tolist()
    return [tuple(torch.randint(0, 256, (length,), generator=numbers).tolist()) for length in lengths]


def work(prompt: tuple[int, ...], tokens: int = TOKENS, **output: int) -> Work:
    return Work(
        request_id=new_request_id("exact"),
        token_ids=prompt,
        max_tokens=tokens,
        stop=StopConditions(max_tokens=tokens, ignore_eos=True),
        sampling=Sampling(temperature=0.0),
        output=OutputOptions(**output),
    )


class Answer:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.end: Finished | None = None
        self.prompt_logprobs: Logprobs | None = None


async def answer(engine: TorchEngine, asked: Work) -> Answer:
    stream, found = engine.submit(asked), Answer()
    while outputs := await stream.read():
        for output in outputs:
            match output:
                case TokenDelta():
                    found.tokens += output.token_ids
                    if output.logprobs is not None:
                        found.logprobs.append(output.logprobs)
                case PromptScored():
                    found.prompt_logprobs = output.logprobs
                case Finished():
                    found.end = output
    return found


async def ask_all(directory: Path, works: list[Work], together: bool = True, **options: object) -> list[Answer]:
    defaults: dict[str, object] = {"dtype": "float32", "threads": 1, "blocks": 256, "max_running": 16}
    engine = TorchEngine(TorchOptions(**(defaults | options)), directory, "tiny")
    async with running(engine):
        if together:
            return list(await asyncio.gather(*(answer(engine, asked) for asked in works)))
        return [await answer(engine, asked) for asked in works]


BACKENDS: dict[str, dict[str, object]] = {"native": {"native": True}, "torch": {"native": False}}
if torch.cuda.is_available():
    BACKENDS["cuda"] = {"device": "cuda"}
BACKENDS = {name: {"device": "cpu", **options} for name, options in BACKENDS.items()}


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> dict[str, object]:
    return BACKENDS[request.param]


def test_one_request_at_a_time(model: tuple[Path, Reference], backend: dict[str, object]) -> None:
    directory, reference = model
    asked = [*prompts(2), (5,)]
    answers = run_bounded(ask_all(directory, [work(p) for p in asked], together=False, **backend), 60)
    assert [found.tokens for found in answers] == [reference.tokens(p) for p in asked]


def test_a_batch_with_chunks_preemption_and_shared_prefixes(
    model: tuple[Path, Reference], backend: dict[str, object]
) -> None:
    directory, reference = model
    asked = prompts(6)
    asked += [asked[0], (*asked[1][:40], 9, 9), asked[2] + (1, 2, 3)]
    # Eleven tokens a step cut every prompt into chunks; 40 blocks of 4 hold about two of the nine at a time.
    options: dict[str, object] = {"block_size": 4, "blocks": 40, "batch_tokens": 11, "max_running": 8}
    answers = run_bounded(ask_all(directory, [work(p) for p in asked], **options, **backend), 110)
    assert [found.tokens for found in answers] == [reference.tokens(p) for p in asked]


def test_a_cached_prompt_gives_the_same_tokens(model: tuple[Path, Reference], backend: dict[str, object]) -> None:
    directory, reference = model
    (prompt,) = prompts(1, shortest=60)
    works = [work(prompt), work(prompt), work((*prompt[:32], 1, 2)), work(prompt)]
    answers = run_bounded(ask_all(directory, works, together=False, block_size=8, **backend), 60)
    expected = [reference.tokens(asked.token_ids) for asked in works]
    assert [found.tokens for found in answers] == expected
    cached = [found.end.cached_tokens if found.end else None for found in answers]
    whole = (len(prompt) - 1) // 8 * 8
    assert cached == [0, whole, 32, whole]


def test_log_probabilities_of_output_and_prompt(model: tuple[Path, Reference], backend: dict[str, object]) -> None:
    directory, reference = model
    (prompt,) = prompts(1, shortest=40)
    asked = work(prompt, logprobs=3, prompt_logprobs=2)
    (found,) = run_bounded(ask_all(directory, [asked], batch_tokens=16, **backend), 60)
    expected = reference.logprobs((*prompt, *found.tokens))
    chosen = [value for part in found.logprobs for value in part.chosen]
    top = [position for part in found.logprobs for position in part.top]
    for number, token in enumerate(found.tokens):
        row = expected[len(prompt) - 1 + number]
        assert chosen[number] == pytest.approx(float(row[token]), abs=1e-4)
        best = torch.topk(row, 3)
        assert [entry.logprob for entry in top[number]] == pytest.approx(best.values.tolist(), abs=1e-4)
    scored = found.prompt_logprobs
    assert scored is not None
    assert len(scored.chosen) == len(prompt) - 1
    for number, token in enumerate(prompt[1:]):
        assert scored.chosen[number] == pytest.approx(float(expected[number][token]), abs=1e-4)
        assert len(scored.top[number]) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_bfloat16_on_a_gpu_is_near_float32(model: tuple[Path, Reference]) -> None:
    """Captured graphs, with the grouped product of experts. Rounding may change the experts of a row: not all agree."""
    directory, reference = model
    works = [work(prompt, logprobs=1) for prompt in prompts(6)]
    answers = run_bounded(ask_all(directory, works, dtype="bfloat16", device="cuda"), 60)
    differences = []
    for asked, found in zip(works, answers, strict=True):
        expected = reference.logprobs((*asked.token_ids, *found.tokens))[len(asked.token_ids) - 1 : -1]
        chosen = torch.tensor([value for part in found.logprobs for value in part.chosen])
        differences.append((expected.gather(1, torch.tensor(found.tokens)[:, None])[:, 0] - chosen).abs())
    assert torch.cat(differences).median() < 0.1
