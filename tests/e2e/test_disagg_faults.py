"""Prefill and decode workers that die, freeze or lose each other under load: clients get an answer or an error."""

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from baton.config.runtime import RuntimeOptions
from baton.errors import PeerLost
from baton.ports.runtime import Client, Wire
from baton.ports.transfer import BlockMemory, KvShape
from baton.protocol.codec import convert
from baton.runtimes.dynamo.runtime import DynamoRuntime
from baton.transfer import wire
from tests.e2e.disagg_load import (
    BOUND_S,
    EXACT,
    QUICK,
    Load,
    Question,
    Visitor,
    ask,
    assert_nothing_held,
    assert_replaced,
    cut_connections,
    kv_files,
    letters,
    make_questions,
    reference,
    rooms,
)
from tests.e2e.harness import BATON, Serve, eventually, free_ports

__all__ = ["letters"]

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(480)]

ON_GPU = Path("/dev/nvidiactl").exists()  # then the KV is in no file

FREEZES = 5
CALM = 8
CLIENTS = 10
PREFILL, DECODE = (0, 1), (2, 3)


@pytest.fixture(scope="module")
def texts(start_shared: Callable[..., Serve], letters: Path) -> dict[Question, str]:
    """Questions, and what one worker that does everything answers."""
    whole = start_shared(Serve, "--model", str(letters), *EXACT, engine="torch")
    texts = reference(whole, make_questions(16, prompt=(100, 1500), tokens=(50, 400)))
    whole.stop()
    return texts


@pytest.fixture(scope="module")
def four(start_shared: Callable[..., Serve], letters: Path) -> Iterator[Serve]:
    """Two prefill and two decode workers that share memory, which the tests break in turn."""
    serve = start_shared(Serve, "--model", str(letters), *EXACT, *QUICK, engine="torch", prefill=2, decode=2)
    yield serve
    serve.stop()


@pytest.mark.parametrize(
    ("victim", "role", "number"),
    [
        (PREFILL[0], "prefill", signal.SIGKILL),
        (DECODE[0], "decode", signal.SIGKILL),
        (PREFILL[1], "prefill", signal.SIGSTOP),
        (DECODE[1], "decode", signal.SIGSTOP),
    ],
    ids=["prefill killed", "decode killed", "prefill frozen", "decode frozen"],
)
def test_one_of_two_workers_dies_or_freezes(
    four: Serve, texts: dict[Question, str], victim: int, role: str, number: signal.Signals
) -> None:
    others = {worker: four.worker(worker).pid for worker in (*PREFILL, *DECODE) if worker != victim}
    process = four.worker(victim)
    with Load(four, texts, CLIENTS) as load:
        load.flow()
        memory = kv_files(process.pid, "rw")  # of a prefill worker: nobody reads that of the others
        for worker in DECODE if role == "prefill" and not ON_GPU else ():
            eventually(lambda w=worker: memory < kv_files(others[w], "r-"), what="its memory is mapped")
        process.send_signal(number)
        eventually(lambda: four.worker(victim).pid != process.pid, 30, "another process is started")
        load.flow()
        eventually(lambda: four.health(victim) == 200, 60, "it is healthy")
        load.flow()
    # Three moves are mostly enough; a request that meets what is broken each time ends in a 503.
    assert len(load.bad(503)) <= CLIENTS, load.summary()
    assert_replaced(four, victim, process.pid, role)
    assert {worker: four.worker(worker).pid for worker in others} == others, "nobody else has suffered"
    assert_nothing_held(four, prefill=2)
    for worker in DECODE:
        assert not memory & kv_files(four.worker(worker).pid)


class Pair:
    """One prefill and one decode worker, with KV over TCP, and rooms at a port that is known."""

    def __init__(self, serve: Serve, port: int, directory: Path) -> None:
        self.serve = serve
        self.port = port
        self.directory = directory

    def ended(self, end: str) -> float:
        """Return how many rooms have ended so."""
        return self.serve.metric("baton_rooms_ended_total", 0, outcome=end)


@pytest.fixture(scope="module")
def pair(start_shared: Callable[..., Serve], letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory, port = tmp_path_factory.mktemp("discovery"), free_ports(1)
    flags = ("--kv-transports", "tcp", "--kv-port", str(port), "--runtime-directory", str(directory))
    serve = start_shared(Serve, "--model", str(letters), *EXACT, *QUICK, *flags, engine="torch", prefill=1, decode=1)
    yield Pair(serve, port, directory)
    serve.stop()


@pytest.fixture(autouse=True)
def calm(request: pytest.FixtureRequest) -> None:
    """What the test before has broken is over: the frontend leaves a lone worker alone for seconds after a failure."""
    if "pair" not in request.fixturenames:
        return
    pair: Pair = request.getfixturevalue("pair")
    texts: dict[Question, str] = request.getfixturevalue("texts")
    questions = list(texts)[:CALM]
    eventually(
        lambda: all(ask(pair.serve, question, stream=False).text == texts[question] for question in questions),
        BOUND_S,
        "everything is answered again",
    )


@pytest.mark.parametrize("worker", [0, 1], ids=["prefill", "decode"])
def test_a_worker_that_freezes_for_a_moment_loses_nothing(pair: Pair, texts: dict[Question, str], worker: int) -> None:
    pid = pair.serve.worker(worker).pid
    with Load(pair.serve, texts, CLIENTS) as load:
        for _ in range(3):
            load.flow(4)
            freeze(pair.serve.worker(worker), 0.4)
        load.flow()
    assert load.bad() == []
    assert pair.serve.worker(worker).pid == pid
    assert_nothing_held(pair.serve, prefill=1)


@pytest.mark.parametrize("worker", [0, 1], ids=["prefill", "decode"])
def test_a_worker_that_is_taken_for_lost_and_comes_back(pair: Pair, texts: dict[Question, str], worker: int) -> None:
    pid, failed = pair.serve.worker(worker).pid, pair.ended("failed")
    with Load(pair.serve, texts, CLIENTS) as load:
        for _ in range(FREEZES):
            load.flow()
            eventually(lambda: rooms(pair.serve, 0) > 0, what="there is something to lose")
            freeze(pair.serve.worker(worker), 3)
            if pair.ended("failed") > failed:
                break  # else what there was had been taken before it froze
        load.flow()
    load.bad(503)
    assert pair.ended("failed") > failed
    assert pair.serve.worker(worker).pid == pid
    assert_nothing_held(pair.serve, prefill=1)


def freeze(process: psutil.Process, seconds: float) -> None:
    process.suspend()
    time.sleep(seconds)
    process.resume()


def test_connections_between_the_workers_are_cut(pair: Pair, texts: dict[Question, str]) -> None:
    process, failed, cut = pair.serve.worker(0), pair.ended("failed"), 0
    with Load(pair.serve, texts, CLIENTS) as load:
        load.flow()
        for _ in range(4):
            cut += eventually(lambda: cut_connections(process.pid, pair.port), what="a connection is cut")
            load.flow()
    # The frontend leaves a worker alone for some seconds when two attempts of one request overlap there: 503, or 404
    # while it lists no worker at all.
    load.bad(503, 404)
    assert cut >= 4
    assert pair.ended("failed") > failed
    assert pair.serve.worker(0).pid == process.pid
    assert_nothing_held(pair.serve, prefill=1)


@asynccontextmanager
async def prefill_clients(pair: Pair) -> AsyncGenerator[tuple[Client, BlockMemory], None]:
    """Yield what calls the prefill worker as a frontend does, and a memory that is like its own."""
    runtime = DynamoRuntime(RuntimeOptions(directory=str(pair.directory)))
    await runtime.start()
    try:
        client, teller = [await runtime.client(f"baton.prefill.{endpoint}") for endpoint in ("generate", "kv")]
        for each in (client, teller):
            await each.ready(10)
        async with aclosing(teller.call({})) as answers:
            [shape] = [convert(answer, KvShape) async for answer in answers]
        planes, block = 2 * shape.layers, shape.block_size * shape.kv_heads * shape.head_dim * 4
        yield (
            client,
            BlockMemory(shape=shape, address=0, planes=planes, plane_bytes=64 * block, block_bytes=block, blocks=64),
        )
    finally:
        await runtime.shutdown()


@asynccontextmanager
async def open_room(pair: Pair, client: Client, room: int) -> AsyncGenerator[AsyncGenerator[Wire, None], None]:
    """Have a prompt computed for a room whose secret is "secret"; yields what the call still says."""
    bootstrap = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.port, "bootstrap_room": room}
    request: Wire = {
        "token_ids": [number % 256 for number in range(100)],
        "stop_conditions": {"max_tokens": 1},
        "sampling_options": {},
        "bootstrap_info": {**bootstrap, "handoff_id": "secret"},
    }
    async with aclosing(client.call(request)) as chunks:
        assert (await anext(chunks))["disaggregated_params"] == {}
        yield chunks


async def last_words(chunks: AsyncGenerator[Wire, None]) -> tuple[object, int]:
    """Return how the call ended, and how many tokens it counts: none if nobody took the KV.

    It ends well in any case. The decode worker says what went wrong; two failures of one request harm its next attempt.
    """
    [*_, last] = [chunk async for chunk in chunks]
    return last["finish_reason"], last["completion_usage"]["completion_tokens"]


def visit(pair: Pair, room: int, secret: bytes, memory: BlockMemory) -> Visitor:
    return Visitor(pair.port, wire.ROOM_PREAMBLE, wire.encode(wire.Claim(room, secret, memory)), beats=True)


def test_who_has_no_right_to_a_room_gets_nothing_and_takes_nothing(pair: Pair, texts: dict[Question, str]) -> None:
    done = pair.ended("done")

    async def visits() -> None:
        async with prefill_clients(pair) as (client, memory), open_room(pair, client, 7) as chunks:
            assert wrong(visit(pair, 7, b"guess", memory)) == "wrong secret for room 7"
            assert wrong(visit(pair, 7, b"", memory)) == "wrong secret for room 7"
            guest = visit(pair, 7, b"secret", memory)
            accepted = await asyncio.to_thread(guest.hear)
            assert isinstance(accepted, wire.Accepted)
            assert (accepted.transports, accepted.prompt_tokens) == (("tcp",), 100)
            assert wrong(visit(pair, 7, b"secret", memory)) == "room 7 is already claimed"
            blocks: list[int] = []
            while not isinstance(message := await asyncio.to_thread(guest.hear), wire.Computed) or not message.complete:
                assert isinstance(message, wire.Computed)
                blocks += message.blocks
            assert len([*blocks, *message.blocks]) == 7  # of 16 tokens
            guest.send(wire.encode(wire.Taken()))
            assert await asyncio.to_thread(guest.hear) == wire.Released()
            assert await asyncio.to_thread(guest.hear) is None
            assert await last_words(chunks) == ("length", 1)
            assert wrong(visit(pair, 7, b"secret", memory)) == "room 7 has ended: done"

    def wrong(visitor: Visitor) -> str:
        message = visitor.hear()
        assert isinstance(message, wire.Failed)
        assert visitor.hear() is None
        return message.message

    with Load(pair.serve, texts, CLIENTS) as load:
        load.flow(4)
        asyncio.run(asyncio.wait_for(visits(), 60))
        load.flow(4)
    assert load.bad() == []
    assert pair.ended("done") > done
    assert_nothing_held(pair.serve, prefill=1)


def test_a_second_prefill_with_the_same_ticket_can_be_retried_and_the_first_keeps_its_room(pair: Pair) -> None:
    done = pair.ended("done")

    async def visits() -> None:
        async with prefill_clients(pair) as (client, memory), open_room(pair, client, 11) as chunks:
            guest = visit(pair, 11, b"secret", memory)
            assert isinstance(await asyncio.to_thread(guest.hear), wire.Accepted)
            with pytest.raises(PeerLost, match="11 is in use"):
                async with open_room(pair, client, 11):
                    pass
            while not isinstance(message := await asyncio.to_thread(guest.hear), wire.Computed) or not message.complete:
                assert isinstance(message, wire.Computed)
            guest.send(wire.encode(wire.Taken()))
            assert await asyncio.to_thread(guest.hear) == wire.Released()
            assert await last_words(chunks) == ("length", 1)

    asyncio.run(asyncio.wait_for(visits(), 60))
    assert pair.ended("done") == done + 1
    assert_nothing_held(pair.serve, prefill=1)


def test_a_corrupt_frame_ends_only_its_own_room(pair: Pair, texts: dict[Question, str]) -> None:
    failed = pair.ended("failed")

    async def visits() -> None:
        async with prefill_clients(pair) as (client, memory), open_room(pair, client, 8) as chunks:
            guest = visit(pair, 8, b"secret", memory)
            assert isinstance(await asyncio.to_thread(guest.hear), wire.Accepted)
            frame = wire.encode(wire.Taken())
            guest.send(frame[:-1] + bytes([frame[-1] ^ 1]))
            while await asyncio.to_thread(guest.hear) is not None:
                pass  # what was computed
            assert await last_words(chunks) == ("length", 0)

    with Load(pair.serve, texts, CLIENTS) as load:
        load.flow(4)
        asyncio.run(asyncio.wait_for(visits(), 60))
        load.flow(4)
    assert load.bad() == []
    assert pair.ended("failed") == failed + 1
    assert_nothing_held(pair.serve, prefill=1)


def test_a_room_that_nobody_comes_to_expires(pair: Pair, texts: dict[Question, str]) -> None:
    before = pair.ended("expired")

    async def visits() -> None:
        async with prefill_clients(pair) as (client, memory):
            absent = visit(pair, 10, b"secret", memory)  # a room that never opens
            async with open_room(pair, client, 9) as chunks:
                assert await last_words(chunks) == ("length", 0)
            forgotten = wire.Failed("peer_lost", "the prefill has not begun within 4 s")
            expired = wire.Failed("peer_lost", "no worker has claimed it within 4 s")
            message = await asyncio.to_thread(visit(pair, 9, b"secret", memory).hear)
            assert message in (expired, forgotten)  # a busy machine may take longer than rooms are remembered
            assert await asyncio.to_thread(absent.hear) == forgotten

    with Load(pair.serve, texts, CLIENTS) as load:
        load.flow(4)
        asyncio.run(asyncio.wait_for(visits(), 60))
        load.flow(4)
    assert load.bad() == []
    assert pair.ended("expired") > before
    assert_nothing_held(pair.serve, prefill=1)


def test_bytes_that_mean_nothing_harm_nobody(pair: Pair, texts: dict[Question, str]) -> None:
    shape = KvShape(model="other", dtype="float32", layers=1, kv_heads=1, head_dim=1, block_size=1)
    other = BlockMemory(shape=shape, address=0, planes=1, plane_bytes=1, block_bytes=1, blocks=1)
    sent = [
        b"",
        b"BatonKV2",
        b"GET / HTTP/1.1\r\n\r\n",
        wire.ROOM_PREAMBLE,
        wire.ROOM_PREAMBLE + os.urandom(4096),
        wire.ROOM_PREAMBLE + wire.HEAD.pack(wire.MAX_FRAME_BYTES + 1, 0),
        wire.ROOM_PREAMBLE + wire.HEAD.pack(3, 0) + b"abc",
        wire.ROOM_PREAMBLE + wire.encode(wire.Taken()),
        wire.ROOM_PREAMBLE + wire.encode(wire.Open("tcp")),
        wire.ROOM_PREAMBLE + wire.encode(wire.Claim(1, b"secret", other)),
        wire.ROOM_PREAMBLE + wire.encode(wire.Claim(1, b"s" * 9000, other)),
        wire.DATA_PREAMBLE + os.urandom(4096),
    ]
    with Load(pair.serve, texts, CLIENTS) as load:
        load.flow(4)
        visitors = [Visitor(pair.port, data) for data in sent]
        gone = [Visitor(pair.port, data) for data in sent]
        for visitor in gone:
            visitor.hang_up()
        for visitor, data in zip(visitors, sent, strict=True):
            heard = visitor.hear()
            assert heard is None or isinstance(heard, wire.Failed), data
            assert heard is None or visitor.hear() is None
        load.flow(4)
    assert load.bad() == []
    assert_nothing_held(pair.serve, prefill=1)


@pytest.mark.parametrize("worker", [0, 1], ids=["prefill", "decode"])
def test_the_only_worker_of_a_role_dies_and_is_replaced(pair: Pair, texts: dict[Question, str], worker: int) -> None:
    process = pair.serve.worker(worker)
    with Load(pair.serve, texts, CLIENTS) as load:
        load.flow()
        process.kill()
        eventually(lambda: pair.serve.worker(worker).pid != process.pid, 30, "another process is started")
        eventually(lambda: pair.serve.health(worker) == 200, 60, "it is healthy")
        load.flow(20)
    # While the frontend knows nobody else to ask: 503, or 500 in the seconds in which it still lists the dead prefill
    # worker, or 404 once the last decode worker is forgotten.
    load.bad(503, 500, 404)
    assert_replaced(pair.serve, worker, process.pid, ("prefill", "decode")[worker])
    assert_nothing_held(pair.serve, prefill=1)


def test_a_full_dev_shm_is_not_needed(
    start: Callable[..., Serve],
    letters: Path,
    texts: dict[Question, str],
    tmp_path: Path,
) -> None:
    full = "mount -t tmpfs -o size=4k full /dev/shm && { head -c 8k /dev/zero > /dev/shm/fill 2> /dev/null || true; }"
    command = ("unshare", "--mount", "sh", "-c")
    if shutil.which("unshare") is None or subprocess.run([*command, full], check=False).returncode:
        pytest.skip("no mount namespace of one's own: needs root")
    wrapper = tmp_path / "baton"
    wrapper.write_text(f'#!/bin/sh\nexec {" ".join(command)} \'{full}; exec "$0" "$@"\' {BATON} "$@"\n')
    wrapper.chmod(0o755)
    serve = start(
        Serve,
        "--model",
        str(letters),
        *EXACT,
        "--kv-transports",
        "shm",
        engine="torch",
        prefill=1,
        decode=1,
        program=str(wrapper),
    )
    mounts = Path(f"/proc/{serve.worker(1).pid}/mounts").read_text()
    assert "full /dev/shm" in mounts
    for question, text in list(texts.items())[:6]:
        assert ask(serve, question, stream=False).text == text
    assert serve.metric("baton_transfer_bytes_total", 1, transport="shm") > 0
    serve.stop()
