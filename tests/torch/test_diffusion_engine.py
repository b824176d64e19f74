"""The built-in engine with a diffusion language model: the engine contract, commands, and what it refuses."""

from pathlib import Path

import msgspec
import pytest

from baton.config.engines import TorchOptions
from baton.engines.torch.engine import TorchEngine
from baton.errors import ConfigError, InvalidRequest, Unsupported
from baton.ports.engine import Engine, HandoffStyle, Work
from baton.protocol.commands import ClearCache, Continue, FromDisk, Pause, ReleaseMemory, ResumeMemory, UpdateWeights
from baton.protocol.ids import RequestId
from baton.protocol.requests import DiffusionOptions, Remasking, Sampling
from baton.testing import EngineContract
from baton.testing.bounded import run_bounded
from tests.doubles.tiny_models import make_tiny_diffusion
from tests.torch.torch_sessions import Session, fresh_answer, read, session

TAGS = ("kv_cache", "weights")


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_tiny_diffusion(tmp_path_factory.mktemp("sdar"), changes={"num_hidden_layers": 2})
    for contract in (TestDiffusionEngine, TestDiffusionEngineWithoutNative):
        contract.directory = directory
    return directory


class TestDiffusionEngine(EngineContract):
    directory: Path
    native = True
    long_tokens = 600
    limit_s = 60.0

    def make_engine(self) -> Engine:
        options = TorchOptions(
            dtype="float32", threads=1, blocks=800, max_running=4, batch_tokens=256, context=4096, native=self.native
        )
        return TorchEngine(options, self.directory, "tiny")

    def make_broken_engine(self) -> Engine:
        return TorchEngine(TorchOptions(), self.directory / "nowhere", "broken")


@pytest.mark.slow
class TestDiffusionEngineWithoutNative(TestDiffusionEngine):
    native = False


def work(**changes: object) -> Work:
    plain = Work(request_id=RequestId("r"), token_ids=tuple(range(1, 20)), max_tokens=8)
    return msgspec.structs.replace(plain, **changes)


@pytest.mark.parametrize(
    ("changes", "error", "names"),
    [
        ({"diffusion": DiffusionOptions(block_length=5)}, InvalidRequest, r"diffusion\.block_length: 5"),
        ({"diffusion": DiffusionOptions(block_length=32)}, InvalidRequest, r"diffusion\.block_length: 32"),
        ({"diffusion": DiffusionOptions(steps=5)}, InvalidRequest, r"diffusion\.steps: 5"),
        ({"diffusion": DiffusionOptions(steps=3, block_length=2)}, InvalidRequest, r"diffusion\.steps: 3"),
        (
            {"diffusion": DiffusionOptions(threshold=0.5, remasking=Remasking.STATIC)},
            InvalidRequest,
            r"diffusion\.threshold",
        ),
        ({"sampling": Sampling(presence_penalty=0.5)}, Unsupported, "presence_penalty"),
        ({"sampling": Sampling(frequency_penalty=-0.5)}, Unsupported, "frequency_penalty"),
        ({"sampling": Sampling(repetition_penalty=1.1)}, Unsupported, "repetition_penalty"),
        ({"sampling": Sampling(use_beam_search=True)}, Unsupported, "use_beam_search"),
    ],
    ids=str,
)
def test_what_cannot_be_decoded_is_refused_by_name(
    model: Path, changes: dict[str, object], error: type[Exception], names: str
) -> None:
    async def body() -> None:
        async with session(model) as here:
            with pytest.raises(error, match=names):
                here.engine.submit(work(**changes))
            assert len(await here.generate()) == 16

    run_bounded(body(), 30)


def test_capabilities_name_what_a_diffusion_model_has(model: Path) -> None:
    async def body() -> None:
        async with session(model) as here:
            can = here.engine.capabilities
            assert can.diffusion
            assert can.diffusion_options == {"remasking", "block_length", "steps", "threshold"}
            assert (can.guided, can.logit_bias, can.bad_words, can.prompt_logprobs) == (frozenset(), *[False] * 3)
            assert (can.handoff, here.info.kv) == (HandoffStyle.NONE, None)

    run_bounded(body(), 30)


def test_kv_blocks_hold_whole_blocks_of_the_model(tmp_path: Path) -> None:
    directory = make_tiny_diffusion(tmp_path, block_size=12)

    async def body() -> None:
        async with session(directory, block_size=16) as here:
            assert here.info.block_size == 24
            assert len(await here.generate()) == 16

    run_bounded(body(), 30)


def test_output_can_fill_the_context_although_it_ends_inside_a_block(model: Path) -> None:
    async def body() -> None:
        async with session(model, context=50) as here:
            assert len(await here.generate(tuple(range(1, 41)), 10)) == 10

    run_bounded(body(), 30)


@pytest.mark.parametrize("native", [True, False])
def test_commands_between_steps_do_not_change_an_answer(model: Path, native: bool) -> None:
    async def body() -> None:
        expected = await fresh_answer(model, native=native)
        async with session(model, native=native) as here:
            await _interrupted(here, expected, Pause(mode="retract"), Continue())
            await _interrupted(here, expected, Pause(mode="keep"), Continue())
            await _interrupted(here, expected, ReleaseMemory(tags=TAGS), ResumeMemory(tags=TAGS))
            await _interrupted(here, expected, ClearCache(), ClearCache())
            assert await here.generate() == expected

    run_bounded(body(), 60)


async def _interrupted(here: Session, expected: list[int], *commands: object) -> None:
    """Execute commands while a request runs whose first block has been read."""
    _, stream = here.start()
    tokens, end = await read(stream, at_least=1)
    for command in commands:
        await here.execute(command)
    if end is None:
        tokens += (await read(stream))[0]
    assert tokens == expected


def test_new_weights_are_used_for_cached_prompts_too(model: Path, tmp_path: Path) -> None:
    other = make_tiny_diffusion(tmp_path, seed=5, changes={"num_hidden_layers": 2})

    async def body() -> None:
        expected = await fresh_answer(other)
        async with session(model) as here:
            assert await here.generate() != expected
            await here.execute(UpdateWeights(source=FromDisk(path=str(other)), version="2"))
            assert await here.generate() == expected

    run_bounded(body(), 60)


def test_weights_of_another_block_length_are_another_model(model: Path, tmp_path: Path) -> None:
    other = make_tiny_diffusion(tmp_path, changes={"num_hidden_layers": 2}, block_size=8)

    async def body() -> None:
        async with session(model) as here:
            with pytest.raises(InvalidRequest, match="block_length"):
                await here.execute(UpdateWeights(source=FromDisk(path=str(other)), version="2"))

    run_bounded(body(), 30)


def test_a_model_without_a_mask_token_does_not_start(tmp_path: Path) -> None:
    directory = make_tiny_diffusion(tmp_path, mask_token_id=None)
    engine = TorchEngine(TorchOptions(dtype="float32"), directory, "tiny")

    async def body() -> None:
        with pytest.raises(ConfigError, match="mask_token_id"):
            await engine.start()
        await engine.stop()

    run_bounded(body(), 30)
