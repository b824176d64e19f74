"""The processes of the real SGLang: none is left behind, and none takes us with it."""

import asyncio
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.engines.sglang.readings import EventSockets, Watch
from baton.errors import BatonError, ConfigError, EngineDead
from baton.testing.bounded import eventually
from baton.testing.engine_session import Session, read_to_the_end
from tests.real_sglang.engines import Bench, TestedEngine, shared_memory_of
from tests.real_sglang.peers import Peer
from tests.real_sglang.test_generating import answer_of, work


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def children() -> set[int]:
    """The processes under this one, but for Python's own that looks after shared memory."""
    found = psutil.Process().children(recursive=True)
    return {child.pid for child in found if "resource_tracker" not in " ".join(child.cmdline())}


def test_nothing_is_left_after_a_stop(
    bench: Bench, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, known = children(), shared_memory_of([psutil.Process()])

    async def body() -> None:
        engine = TestedEngine(tiny, metrics=True)
        await engine.start()
        assert len(children() - before) >= 2
        assert "sglang:" in engine.metrics()
        made = shared_memory_of([psutil.Process(), *psutil.Process().children(recursive=True)]) - known
        assert made
        await engine.stop()
        assert children() == before
        assert not [path for path in made if path.exists()]

    bench.run(body(), 120)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_killed_worker(bench: Bench, tiny: Path) -> None:
    async def body() -> None:
        peer = await Peer.start(tiny, "null")
        family = peer.family()
        assert len(family) >= 3
        os.kill(peer.process.pid, signal.SIGKILL)
        await peer.process.wait()
        await eventually(lambda: not any(_runs(process) for process in family), 10)

    bench.run(body(), 240)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("which", ["scheduler", "detokenizer"])
def test_the_death_of_a_process_is_told_to_everyone(bench: Bench, tiny: Path, which: str) -> None:
    async def body() -> None:
        engine = TestedEngine(tiny)
        session = Session(engine, await engine.start())
        listening = asyncio.create_task(session.listen())
        streams = [engine.submit(work(2000)) for _ in range(6)]
        await streams[0].read()
        (victim,) = [child for child in psutil.Process().children() if which in " ".join(child.cmdline())]
        victim.kill()
        for stream in streams:
            with pytest.raises(EngineDead):
                await read_to_the_end(stream)
        with pytest.raises(EngineDead):
            await listening
        with pytest.raises(EngineDead):
            engine.submit(work(1))
        await engine.stop()
        assert not children()

    bench.run(body(), 120)


class HeldReader:
    """A reader of loads whose lock is held by a scheduler that is stopped."""

    def __init__(self) -> None:
        self.reading = threading.Event()
        self.released = threading.Event()

    def read_all(self) -> list[Any]:
        self.reading.set()
        self.released.wait()
        return []

    def close(self) -> None:
        pass


def test_a_stop_does_not_wait_for_a_stopped_scheduler(bench: Bench) -> None:
    reader = HeldReader()

    async def body() -> None:
        watch = Watch(reader, EventSockets((), None), (), 16, lambda _: None, lambda _: None)
        await asyncio.to_thread(reader.reading.wait)
        await watch.stop()

    try:
        bench.run(body())
    finally:
        reader.released.set()


def test_an_engine_that_cannot_load_fails_to_start_and_leaves_nothing(bench: Bench, tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"\xff" * 64)

    async def body() -> None:
        engine = TestedEngine(broken)
        with pytest.raises(BatonError) as failure:
            await engine.start()
        assert failure.value.scope == "worker"
        await engine.stop()
        assert not children()
        engine = TestedEngine(tiny)
        session = Session(engine, await engine.start())
        assert len((await answer_of(session, work(4)))[0]) == 4
        await engine.stop()

    bench.run(body(), 200)


@pytest.mark.parametrize("begun", [False, True])
def test_a_start_that_is_stopped_ends_soon(bench: Bench, tiny: Path, begun: bool) -> None:
    async def body() -> None:
        engine = TestedEngine(tiny)
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        if begun:
            await eventually(lambda: bool(children()), 30)
        starting.cancel()
        await asyncio.wait_for(engine.stop(), 40)
        assert not children()

    bench.run(body(), 120)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--no-such-option",), "no-such-option"),
        (("--tp-size", "many"), "many"),
        (("--attention-backend", "magic"), "magic"),
        (("--disaggregation-mode", "decode"), "role"),
        (("--skip-tokenizer-init",), "guided"),
        (("--incremental-streaming-output",), "streamed"),
        (("--schedule-low-priority-values-first",), "priority"),
        (("--served-model-name", "x"), "--name"),
        (("--model-path", "x"), "--model"),
        (("--help",), "help"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_arguments_that_cannot_be_are_refused_before_anything_starts(
    tiny: Path, args: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        TestedEngine(tiny, "null", *args)


def test_a_port_that_is_in_use_is_said_so(bench: Bench, tiny: Path) -> None:
    async def body() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        engine = TestedEngine(tiny, "prefill", "--disaggregation-bootstrap-port", str(port))
        with pytest.raises(ConfigError, match=str(port)):
            await engine.start()
        await engine.stop()
        server.close()

    bench.run(body(), 60)
