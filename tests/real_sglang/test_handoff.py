"""Two real engines hand KV over by themselves, over NIXL, and give up when they are told to, wherever they are.

The bootstrap server of the prefill engine has an IPv6 address here, and an IPv4 one in `test_serving.py`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.real_sglang.engines import Bench
from tests.real_sglang.hardware import cores_of_ranks, needs_two
from tests.real_sglang.peers import Peer

pytestmark = pytest.mark.timeout(450)

NIXL = ("--disaggregation-transfer-backend", "nixl")
DECODE = (*NIXL, "--disaggregation-decode-retraction-backup", "cpu_tensor")
PROMPT = list(range(20, 120))


@asynccontextmanager
async def pair(model: Path, *prefill_args: str) -> AsyncIterator[tuple[Peer, Peer]]:
    prefill = await Peer.start(model, "prefill", *NIXL, "--host", "::1", *prefill_args)
    decode = await Peer.start(model, "decode", *DECODE)
    try:
        yield prefill, decode
    finally:
        for peer in (prefill, decode):
            if peer.process.returncode is None:
                await peer.stop()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_engines_hand_off_kv_and_abort_in_every_phase(tiny: Path, bench: Bench) -> None:
    async def body() -> None:
        async with pair(tiny) as (prefill, decode):
            await the_answer_is_that_of_one_engine(prefill, decode)
            await d17_a_probe_needs_no_peer(prefill, decode)
            await an_abort_reaches_every_queue(prefill, decode)
            await a_lost_peer_is_said_to_be_lost(prefill, decode)

    bench.run(body(), 400)
    bench.close()


@needs_two
def test_every_rank_of_a_prefill_engine_hands_off_the_rooms_of_its_remainder(
    tiny: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", cores_of_ranks())

    async def body() -> None:
        async with pair(tiny, "--dp-size", "2") as (prefill, decode):
            await the_answer_is_that_of_one_engine(prefill, decode, ranks=2)

    bench.run(body(), 400)
    bench.close()


async def the_answer_is_that_of_one_engine(prefill: Peer, decode: Peer, ranks: int = 1) -> None:
    assert prefill.place["host"] == "[::1]"
    answers = []
    for room in range(3):
        place = {"host": prefill.place["host"], "port": prefill.place["port"], "room": room}
        rank = {"dp_rank": room % ranks} if ranks > 1 else {}
        prefill.order(do="produce", id=f"p.{room}", prompt=PROMPT, **rank, **place)
        decode.order(do="consume", id=f"d.{room}", prompt=PROMPT, tokens=20, **place)
        produced = await prefill.answer("id", f"p.{room}")
        consumed = await decode.answer("id", f"d.{room}")
        assert produced["problem"] is None
        assert consumed["tokens"][:1] == produced["tokens"]
        answers.append(consumed["tokens"])
    assert len(answers[0]) == 20
    assert answers[0] == answers[1] == answers[2]


async def d17_a_probe_needs_no_peer(prefill: Peer, decode: Peer) -> None:
    for peer in (prefill, decode):
        peer.order(do="probe", id="canary", prompt=[5])
        answer = await peer.answer("id", "canary")
        assert (answer["problem"], len(answer["tokens"])) == (None, 1)


async def an_abort_reaches_every_queue(prefill: Peer, decode: Peer) -> None:
    place = {"host": prefill.place["host"], "port": prefill.place["port"]}
    prefill.order(do="produce", id="p.alone", prompt=PROMPT, room=100, **place)
    decode.order(do="consume", id="d.alone", prompt=PROMPT, tokens=9, room=101, **place)
    nowhere = {"host": "127.0.0.1", "port": 9, "room": 102}
    decode.order(do="consume", id="d.nowhere", prompt=PROMPT, tokens=9, **nowhere)
    for peer, request in ((prefill, "p.alone"), (decode, "d.alone"), (decode, "d.nowhere")):
        peer.order(do="abort", id=request)
        await peer.answer("aborted", request)
        assert (await peer.answer("id", request))["problem"] == "cancelled"
    for peer in (prefill, decode):
        peer.order(do="abort", id="nobody")
        assert (await peer.answer("aborted", "nobody"))["busy"] == 0


async def a_lost_peer_is_said_to_be_lost(prefill: Peer, decode: Peer) -> None:
    place = {"host": prefill.place["host"], "port": prefill.place["port"], "room": 200}
    decode.order(do="consume", id="d.lost", prompt=PROMPT, tokens=9, **place)
    await prefill.stop()
    assert (await decode.answer("id", "d.lost", limit_s=90))["problem"] == "peer_lost"
