"""Prefill and decode workers with different KV shapes refuse to start together."""

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from baton.config.settings import Settings
from baton.errors import ConfigError, EngineFailed
from baton.ports.runtime import Context, Service, Wire
from baton.ports.transfer import KvShape
from baton.process.kv_compatibility import kv_path, kv_service, refuse_incompatible_peers
from baton.testing import run_bounded
from baton.testing.memory_runtime import MemoryRuntime

SHAPE = KvShape(model="tiny", dtype="bfloat16", layers=3, kv_heads=2, head_dim=16, block_size=16)
SETTINGS = Settings(engine="torch", namespace="here")


async def compare(shape: KvShape, *others: KvShape, role: str = "decode", engine: str = "torch") -> None:
    runtime = MemoryRuntime()
    settings = msgspec.structs.replace(SETTINGS, engine=engine)
    for other in others:
        await runtime.serve(kv_path(settings, "prefill" if role == "decode" else "decode"), kv_service(other))
    await refuse_incompatible_peers(runtime, settings, role, shape)


def refusal(role: str = "decode", engine: str = "torch", **changes: object) -> str:
    with pytest.raises(ConfigError) as refused:
        run_bounded(compare(msgspec.structs.replace(SHAPE, **changes), SHAPE, role=role, engine=engine))
    return refused.value.message


def test_equal_shapes_and_no_peers_are_accepted() -> None:
    run_bounded(compare(SHAPE, SHAPE, SHAPE))
    run_bounded(compare(SHAPE))


def test_different_block_sizes_are_refused_with_the_flag_to_change() -> None:
    assert refusal(block_size=32) == (
        "this worker's KV blocks have 32 tokens, those of the prefill workers 16: give both the same --torch-block-size"
    )
    assert "those of the decode workers 16" in refusal(role="prefill", block_size=32)


def test_every_other_difference_is_named_too() -> None:
    assert "--torch-dtype" in refusal(dtype="float32")
    assert refusal(model="other", layers=9).endswith("--model")
    assert refusal(layers=9) == "layers of this worker's KV is 9, of the prefill workers' 3: give both the same --model"
    assert refusal(engine="echo", block_size=32).endswith("--model")


def test_one_of_several_that_differs_is_enough() -> None:
    with pytest.raises(ConfigError, match="workers 32"):
        run_bounded(compare(SHAPE, SHAPE, msgspec.structs.replace(SHAPE, block_size=32)))


def test_a_peer_that_does_not_reply_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(request: object, context: Context) -> AsyncGenerator[Wire, None]:
        raise EngineFailed("not today")
        yield {}

    async def hang(request: object, context: Context) -> AsyncGenerator[Wire, None]:
        await asyncio.Event().wait()
        yield {}

    async def reply_garbage(request: object, context: Context) -> AsyncGenerator[Wire, None]:
        yield {"model": 3}

    async def reply_nothing(request: object, context: Context) -> AsyncGenerator[Wire, None]:
        for _ in ():
            yield {}

    async def body() -> None:
        runtime = MemoryRuntime()
        for handle in (fail, hang, reply_garbage, reply_nothing):
            await runtime.serve(kv_path(SETTINGS, "prefill"), Service(handle, lambda raw: raw, lambda reply: reply))
        clock = asyncio.get_running_loop().time
        started = clock()
        await refuse_incompatible_peers(runtime, SETTINGS, "decode", SHAPE)
        assert clock() - started < 4

    run_bounded(body())
    assert len(caplog.messages) == 4
