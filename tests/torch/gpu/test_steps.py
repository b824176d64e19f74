"""Steps on the Triton kernels give the tokens of the plain torch path, whatever is in a batch."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.config.engines import TorchOptions
from baton.engines.torch.core import Core
from baton.engines.torch.runner import Runner
from baton.engines.torch.sampling_params import make_sampling_params
from baton.engines.torch.sequence import Sequence
from baton.models.defaults import SamplingDefaults
from baton.ports.engine import Work
from baton.protocol.ids import RequestId
from baton.protocol.requests import Sampling, StopConditions
from tests.doubles.tiny_models import make_tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
SMALL = {"block_size": 4, "blocks": 24, "batch_tokens": 9, "max_running": 4, "context": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen3", **SHAPE)


def run(directory: Path, kernels: bool, works: list[Work], aborted: frozenset[int] = frozenset()) -> list[list[int]]:
    """Return the tokens of each work; those in `aborted` end after their second step."""
    options = TorchOptions(device=DEVICE if kernels else "cpu", dtype="float32", threads=1, native=False, **SMALL)
    core = Core(Runner(options, directory, lambda done, total: None, kernels=kernels), options)
    for number, one in enumerate(works):
        core.add([Sequence(one, 0, make_sampling_params(one, SamplingDefaults(), 300), number)])
    tokens: dict[str, list[int]] = {str(one.request_id): [] for one in works}
    ended = set()
    steps = 0
    while core.busy:
        core.step()
        steps += 1
        if steps == 2:
            for number in aborted:
                core.abort(works[number].request_id)
        if (result := core.take_result()) is not None:
            assert not result.failed
            for sampled in result.sampled:
                assert sampled.request_id not in ended
                tokens[str(sampled.request_id)].append(sampled.token)
                if sampled.finished is not None:
                    ended.add(sampled.request_id)
    assert core.scheduler.pool.used == 0
    core.close()
    return [found for number, found in enumerate(tokens.values()) if number not in aborted]


def work(number: int, prompt: list[int], tokens: int, temperature: float, stop: list[int]) -> Work:
    return Work(
        request_id=RequestId(f"r{number}"),
        token_ids=tuple(prompt),
        max_tokens=tokens,
        stop=StopConditions(stop_token_ids=stop),
        sampling=Sampling(temperature=temperature, seed=number, top_p=0.9 if number % 2 else 1.0),
    )


PROMPT = st.one_of(
    st.lists(st.integers(0, 255), min_size=1, max_size=20),
    st.integers(0, 12).map(lambda length: [*range(100, 112), *range(length)]),  # with a prefix that others have
)


@pytest.mark.slow
@settings(
    max_examples=2 if DEVICE == "cpu" else 60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    requests=st.lists(st.tuples(PROMPT, st.integers(1, 6), st.sampled_from([0.0, 0.0, 0.7])), min_size=1, max_size=6),
    stops=st.lists(st.integers(0, 299), max_size=100),
    aborted=st.frozensets(st.integers(0, 5), max_size=2),
)
def test_mixed_batches_with_shared_prefixes_chunks_preemption_stops_and_aborts(
    model: Path, requests: list[tuple[list[int], int, float]], stops: list[int], aborted: frozenset[int]
) -> None:
    works = [work(number, *request, stops) for number, request in enumerate(requests)]
    aborted = frozenset(number for number in aborted if number < len(works))
    assert run(model, True, works, aborted) == run(model, False, works, aborted)
