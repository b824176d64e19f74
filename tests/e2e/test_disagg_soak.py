"""Thousands of requests of every kind through disaggregated workers, one in ten given up: nothing stays behind.

What is counted before and after, in workers and frontend: blocks, rooms, requests in hand, connections, threads, open
files, shared mappings, entries in /dev/shm, child processes. Memory must stop growing.
"""

import asyncio
import collections
import itertools
import json
import os
import random
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

pytest.importorskip("torch")

from tests.doubles.tiny_models import make_tiny_model
from tests.e2e.disagg import PREFILL, Reading, difference, seconds_until_free
from tests.e2e.harness import Serve, error_in

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(900)]

MODEL = "tiny"
WARM_UP = {"early": 8000, "late": 600}  # memory grows for the first thousands of requests
PART = {"early": 2000, "late": 1000}
# A process whose memory is in pieces takes some MiB more now and then: what grows in most of the parts is a leak. The
# run for late handoffs is too short to distinguish a leak from a cache that fills.
PARTS = {"early": (3, 9), "late": (1, 1)}
AT_ONCE = 24
GIVEN_UP = 0.1
# Nothing here is about timeouts: those that a machine exceeds which stands still for a while are long.
PATIENT = (
    *("--kv-claim-timeout-s", "60", "--kv-connect-timeout-s", "60", "--kv-peer-timeout-s", "60"),
    *("--stall-timeout-s", "120", "--canary-interval-s", "600"),
)
FLAGS = ("--torch-blocks", "1024", "--torch-batch-tokens", "256", "--torch-threads", "1", *PATIENT)
SMALL_CACHE = {"DYN_TOKENIZER_CACHE_BYTES": "1000000"}  # it fills up in the warm-up
SAMPLES = 10  # of the files in /dev/shm, over a part
ANSWER_S = 180.0
FREE_S = 90.0
SETTLE_S = 30.0
GROWTH_BYTES = 1 << 20  # in a part: half a KiB for each request
# The runtime's pools of threads and connections breathe; a leak of one in a hundred requests would be ten times that.
SPARE = 5
PREFIX = "".join(f"{number} bottles of beer on the wall, " for number in range(40))


class Ask(NamedTuple):
    """One request to make, and when to give it up."""

    path: str
    body: dict[str, object]
    bad: bool  # the answer must be a 400, or such an error as the only event of a stream
    leave_s: float | None


class Strange(Exception):
    """An answer that is neither a text nor the error that the request must get."""


class Usage(NamedTuple):
    """What a process uses of the system."""

    descriptors: int
    connections: int
    threads: int
    shared_mappings: int
    children: int


@pytest.mark.parametrize("style", ["early", "late"])
def test_nothing_stays_behind(
    style: str,
    start: Callable[..., Serve],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    model = make_tiny_model(tmp_path / MODEL)
    flags = ("--model", str(model), *FLAGS, "--kv-handoff", style)
    split = start(Serve, *flags, engine="torch", prefill=1, decode=2, settings=SMALL_CACHE)
    processes = [*(split.worker(number) for number in range(split.workers)), split.frontend()]
    chance = random.Random(7)
    run(split, [ask(chance, style == "late") for _ in range(WARM_UP[style])], lambda _: None)
    seconds_until_free(split, FREE_S)
    before, rooms = settled(processes, None), Reading(split, PREFILL).rooms
    memory = [[private_bytes(process)] for process in processes]
    files: set[str] = set()

    def look(done: int) -> None:
        if done % (PART[style] // SAMPLES) == 0:
            files.update(*(shared_files(process) for process in processes))

    began = time.monotonic()
    tally: collections.Counter[str] = collections.Counter()
    least, most = PARTS[style]
    for part in range(1, most + 1):
        tally += run(split, [ask(chance, style == "late") for _ in range(PART[style])], look)
        for series, process in zip(memory, processes, strict=True):
            series.append(private_bytes(process))
        if part >= least and max(grown(series) for series in memory) < GROWTH_BYTES:
            break
    took_s = time.monotonic() - began
    freed_s = seconds_until_free(split, FREE_S)
    ended = difference(Reading(split, PREFILL).rooms, rooms)
    after = settled(processes, before)
    print(f"{tally.total()} requests in {took_s:.0f} s: {dict(tally)}; rooms: {ended}; free after {freed_s:.2f} s")
    for number, series in enumerate(memory):
        record_property(f"process {number} growth KiB", grown(series) // 1024)
        print(f"process {number}: {before[number]} -> {after[number]}; MiB:", *(f"{mib / 2**20:.1f}" for mib in series))
    assert ended.get("failed", 0) == ended.get("expired", 0) == 0
    assert all(process.is_running() for process in processes)
    for number, (now, then) in enumerate(zip(after, before, strict=True)):
        assert all(value <= known + SPARE for value, known in zip(now, then, strict=True)), f"{number}: {then} -> {now}"
    if style == "early":
        assert max(grown(series) for series in memory) < GROWTH_BYTES
    split.stop()
    assert not files & set(os.listdir("/dev/shm"))


def ask(chance: random.Random, severalfold: bool) -> Ask:
    """Make up a request; several choices are refused unless the system is one that can give them."""
    leave_s = chance.choice((0.0, 0.01, 0.03, 0.1, 0.3)) * chance.random() if chance.random() < GIVEN_UP else None
    prompt = chance.choice(
        (
            f"short {chance.random()}",
            f"{chance.random()} long " * chance.randrange(10, 60),
            PREFIX[: chance.randrange(200, len(PREFIX))],
            PREFIX + str(chance.randrange(50)),
            PREFIX[
                : 16 * chance.randrange(1, 20) + 1
            ],  # whole blocks and a token: decode has had it all, sooner or later
        )
    )
    body: dict[str, object] = {
        "model": MODEL,
        "max_tokens": chance.choice((1, 2, 8, 24, 64)),
        "temperature": chance.choice((0, 1)),
        "stream": chance.random() < 0.5,
    }
    if severalfold and chance.random() < 0.2:
        body |= {"n": 2, "temperature": 1}
    bad = chance.random() < 0.02
    if bad:
        wrong = ({"max_tokens": -1}, {"max_tokens": 100_000})
        several = ({"n": 2, "temperature": 0}, {"n": 2, "temperature": 1})
        body |= chance.choice(wrong if severalfold else (*wrong, *several))
    with_logprobs = chance.random() < 0.3
    if chance.random() < 0.5:
        body |= {"messages": [{"role": "user", "content": prompt}]}
        body |= {"logprobs": True, "top_logprobs": 2} if with_logprobs else {}
        return Ask("/v1/chat/completions", body, bad, leave_s)
    body |= {"prompt": prompt}
    body |= {"logprobs": 2} if with_logprobs else {}
    return Ask("/v1/completions", body, bad, leave_s)


def run(serve: Serve, asks: list[Ask], look: Callable[[int], None]) -> collections.Counter[str]:
    """Make all the requests, some at once; call `look` after each with how many are done. Return how they ended."""
    return asyncio.run(_run(serve, asks, look))


async def _run(serve: Serve, asks: list[Ask], look: Callable[[int], None]) -> collections.Counter[str]:
    tally: collections.Counter[str] = collections.Counter()
    strange: list[str] = []
    todo = iter(asks)

    async def client() -> None:
        for asked in todo:
            try:
                async with asyncio.timeout(ANSWER_S):
                    kind = await outcome(serve, asked)
            except Strange as error:
                kind = "strange"
                strange.append(f"{error} for {str(asked)[:300]}")
            except TimeoutError:
                kind = "no answer"
                strange.append(f"no answer for {str(asked)[:300]}")
            tally[kind] += 1
            look(tally.total())

    async with asyncio.TaskGroup() as clients:
        for _ in range(AT_ONCE):
            clients.create_task(client())
    assert not strange, f"{len(strange)} of {len(asks)} ended as none should:\n" + "\n".join(strange[:20])
    return tally


async def outcome(serve: Serve, asked: Ask) -> str:
    """Make one request; return how it ended. Fails for what is neither a text nor a typed error."""
    data = json.dumps(asked.body).encode()
    head = f"POST {asked.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", serve.port, limit=1 << 24)
    try:
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        async with asyncio.timeout(asked.leave_s):
            answer = await reader.read(-1)
    except TimeoutError:
        return "given up"
    finally:
        writer.transport.abort()
    header, _, rest = answer.partition(b"\r\n\r\n")
    try:
        body = unchunked(rest) if b"chunked" in header.lower() else rest
        return judged(asked, int(header.split(None, 2)[1]), body.decode())
    except (AssertionError, LookupError, ValueError) as error:
        raise Strange(f"{error!r}: {answer[:300]!r} ... {answer[-300:]!r}") from None


def unchunked(data: bytes) -> bytes:
    """Return the body of an answer in chunks. Fails if its end is missing."""
    plain = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return plain
        plain, data = plain + data[:length], data[length + 2 :]


def judged(asked: Ask, status: int, text: str) -> str:
    """Return what kind of answer it is; fail if it is not one that this request may get."""
    if status == 400:
        assert asked.bad
        assert error_in(text)
        return "refused"
    assert status == 200
    if asked.body["stream"]:
        # Not by lines as Python sees them: what a random model says may hold any separator.
        *parts, done = (line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: "))
        assert done == "[DONE]", "the stream does not end"
        chunks = [json.loads(part) for part in parts]
        errors = [chunk["error"] for chunk in chunks if "error" in chunk]
        if asked.bad:
            assert [error["type"] for error in errors] == ["invalid_request_error"]
            return "refused in a stream"
        assert not errors, "an error in the stream"
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
    else:
        choices = json.loads(text)["choices"]
    assert not asked.bad
    ended = {choice["index"] for choice in choices if choice.get("finish_reason") in ("stop", "length")}
    assert len(ended) == asked.body.get("n", 1), "not every choice ends"
    return "streamed" if asked.body["stream"] else "whole"


def settled(processes: list[psutil.Process], wanted: list[Usage] | None) -> list[Usage]:
    """Return what the processes use once that is no more than is wanted, or else does not change for a while."""
    end = time.monotonic() + SETTLE_S
    now = [usage(process) for process in processes]
    while not within(now, wanted) and time.monotonic() < end:
        time.sleep(2)
        last, now = now, [usage(process) for process in processes]
        if wanted is None and last == now:
            break
    return now


def within(now: list[Usage], wanted: list[Usage] | None) -> bool:
    """Return whether no process uses more of anything than is wanted."""
    if wanted is None:
        return False
    return all(
        value <= limit
        for uses, limits in zip(now, wanted, strict=True)
        for value, limit in zip(uses, limits, strict=True)
    )


def usage(process: psutil.Process) -> Usage:
    """Count what a process uses."""
    with process.oneshot():
        return Usage(
            process.num_fds(),
            len(process.net_connections("all")),
            process.num_threads(),
            len(re.findall(r"memfd:|/dev/shm/", Path(f"/proc/{process.pid}/maps").read_text())),
            len(process.children(recursive=True)),
        )


def shared_files(process: psutil.Process) -> set[str]:
    """Return the names in /dev/shm that a process maps; those of other programs come and go."""
    return set(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{process.pid}/maps").read_text()))


def private_bytes(process: psutil.Process) -> int:
    """Return the memory of a process that is no file and not shared, so without the KV."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024


def grown(series: list[int]) -> float:
    """Return by how much the memory grew in a part of the run: the median."""
    return statistics.median(after - before for before, after in itertools.pairwise(series))
