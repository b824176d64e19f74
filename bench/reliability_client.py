"""Clients whose every text is compared: whole, streamed, slow, wrong, and gone before the end."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple

from tests.e2e.disagg_load import COMPLETIONS, MODEL, Question

Kind = Literal["whole", "stream", "slow", "cancelled", "invalid"]

SHARES: dict[Kind, float] = {"cancelled": 0.10, "invalid": 0.03, "slow": 0.02}
ANSWER_TIMEOUT_S = 150.0
RETRY_AFTER_S = 1.0  # a client waits this long after an error
SLOW_READ_BYTES, SLOW_PAUSE_S = 2048, 0.02
# What a client may get while workers are killed: no worker can take the request, or its last one is gone.
EXPECTED_ERRORS = (500, 503, 404)
DEADLINE = 504  # nothing was lost, but nothing noticed for so long that the request could not be answered


class Received(NamedTuple):
    """What a client has of a response: `ended` if it is complete."""

    status: int
    text: str
    error: int
    ended: bool


class Tally:
    """How requests ended."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.hung = 0
        self.longest_gap_s = 0.0

    @property
    def accounted(self) -> int:
        """The requests that have ended in one way or another."""
        return sum(self.outcomes.values())


class Clients:
    """Sends `total` requests from several clients to one port, and records in `tally` how they end."""

    def __init__(self, port: int, texts: Mapping[Question, str], total: int, at_once: int, seed: int) -> None:
        self.tally = Tally()
        self._port = port
        self._texts = texts
        self._questions = list(texts)
        self._left = total
        self._at_once = at_once
        self._chance = random.Random(seed)

    async def run(self) -> None:
        """Return when every request has ended."""
        async with asyncio.TaskGroup() as clients:
            for _ in range(self._at_once):
                clients.create_task(self._client())

    async def _client(self) -> None:
        while self._left > 0:
            self._left -= 1
            kind, question = self._choose()
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    outcome = await self._send(kind, question)
            except TimeoutError:
                self.tally.hung += 1
                outcome = "hung"
            self.tally.outcomes[outcome] += 1
            if outcome.startswith("error"):
                await asyncio.sleep(RETRY_AFTER_S)

    def _choose(self) -> tuple[Kind, Question]:
        plain = (1 - sum(SHARES.values())) / 2
        weights: dict[Kind, float] = {**SHARES, "whole": plain, "stream": plain}
        [kind] = self._chance.choices(list(weights), list(weights.values()))
        return kind, self._chance.choice(self._questions)

    async def _send(self, kind: Kind, question: Question) -> str:
        body = {
            "model": MODEL,
            "prompt": question.prompt,
            "max_tokens": -1 if kind == "invalid" else question.tokens,
            "temperature": 0,
            "stream": kind in ("stream", "slow") or (kind == "cancelled" and self._chance.random() < 0.5),
        }
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        except OSError:
            return "error: connection refused"
        try:
            writer.write(_request(body))
            leave_s = 0.5 * self._chance.random() if kind == "cancelled" else None
            data = await self._read(reader, kind, leave_s)
        except (ConnectionError, asyncio.IncompleteReadError):
            return "error: connection reset"
        finally:
            writer.transport.abort()
        return self._judge(kind, question, _parse(data, bool(body["stream"])))

    async def _read(self, reader: asyncio.StreamReader, kind: Kind, leave_s: float | None) -> bytes:
        data, last = b"", time.monotonic()
        try:
            async with asyncio.timeout(leave_s):
                while chunk := await reader.read(SLOW_READ_BYTES if kind == "slow" else 1 << 20):
                    now = time.monotonic()
                    self.tally.longest_gap_s = max(self.tally.longest_gap_s, now - last)
                    data += chunk
                    if kind == "slow":
                        await asyncio.sleep(SLOW_PAUSE_S)
                    last = time.monotonic()
        except TimeoutError:
            if leave_s is None:
                raise
        return data

    def _judge(self, kind: Kind, question: Question, received: Received) -> str:
        """Return the outcome; a text that is not the expected one, or its beginning, is wrong."""
        expected = self._texts[question]
        if not expected.startswith(received.text) or (received.ended and received.text != expected):
            self.tally.wrong.append(f"{kind}: {received} instead of {expected[:80]!r}...")
            return "wrong"
        if kind == "invalid":
            return "refused" if received.error == 400 else f"error: {received.error}"
        if received.ended:
            return "completed"
        if kind == "cancelled":
            return "cancelled"
        if received.error == DEADLINE:
            self.tally.hung += 1
            return f"error: {received.error}"
        if received.error not in EXPECTED_ERRORS:
            self.tally.wrong.append(f"{kind}: {received}: neither a text nor an error")
            return "wrong"
        return f"error: {received.error}"


def _request(body: Mapping[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + data


def _parse(data: bytes, stream: bool) -> Received:
    head, _, rest = data.partition(b"\r\n\r\n")
    if not head or not rest:
        return Received(0, "", 0, False)
    status = int(head.split(None, 2)[1])
    text, complete = _unchunked(rest) if b"chunked" in head.lower() else (rest, True)
    if status != 200:
        return Received(status, "", status, False)
    try:
        return _parse_stream(text.decode(errors="ignore")) if stream else _parse_whole(text, complete)
    except ValueError:  # cut in the middle of an object: the client has left
        return Received(status, "", 0, False)


def _unchunked(data: bytes) -> tuple[bytes, bool]:
    """Return the body so far, and whether it is complete."""
    plain = b""
    while True:
        size, found, data = data.partition(b"\r\n")
        if not found:
            return plain, False
        length = int(size, 16)
        if not length:
            return plain, True
        plain, data = plain + data[:length], data[length + 2 :]


def _parse_whole(text: bytes, complete: bool) -> Received:
    if not complete or not text:
        return Received(200, "", 0, False)
    [choice] = json.loads(text)["choices"]
    return Received(200, choice["text"], 0, choice["finish_reason"] == "length")


def _status(error: dict[str, object]) -> int:
    """Return the status of an error within a stream: some servers give it, OpenAI's errors have a type."""
    code = error.get("code")
    if isinstance(code, int):
        return code
    return 503 if error.get("type") == "server_error" else 400


def _parse_stream(text: str) -> Received:
    said, error, ended = "", 0, False
    for line in text.split("\n")[:-1]:  # the last line may be cut
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            error = _status(chunk["error"])
            continue
        for choice in chunk["choices"]:
            said += choice["text"]
            ended = ended or choice.get("finish_reason") == "length"
    return Received(200, said, error, ended and not error)
