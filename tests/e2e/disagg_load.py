"""Load whose answers are known, for workers that hand KV to each other while something breaks."""

import ctypes
import http.client
import itertools
import json
import os
import random
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import psutil
import pytest

from baton.transfer import wire
from tests.doubles.tiny_models import make_tiny_model
from tests.e2e.harness import Cluster, Process, Serve, System, error_in, eventually

MODEL = "tiny"
COMPLETIONS = "/v1/completions"
PIDFD_GETFD = 438
DEADLINE_S = 90  # what the workers are told
# Of the errors within a stream, by their codes.
STATUSES = {
    "internal": 500,
    "engine_failed": 500,
    "deadline_exceeded": 504,
    "service_unavailable": 503,
} | dict.fromkeys(("overloaded", "paused", "draining", "peer_lost", "engine_stalled", "engine_dead"), 503)
NO_REPLY = 0  # instead of a status: the frontend does not run, or has ended meanwhile
BOUND_S = DEADLINE_S + 10.0  # what the clients see, at the latest
# Nothing is found in a cache, so that all KV is handed over, in many parts; and what differs by rounding is far apart.
EXACT = (
    *("--name", MODEL, "--torch-dtype", "float32", "--no-torch-prefix-cache"),
    *("--torch-blocks", "1024", "--torch-batch-tokens", "256"),
)
# What is lost is missed soon.
QUICK = (
    *("--kv-heartbeat-s", "0.25", "--kv-peer-timeout-s", "2", "--kv-claim-timeout-s", "4"),
    *("--stall-timeout-s", "5", "--request-timeout-s", str(DEADLINE_S)),
)


def make_letters_model(directory: Path, seed: int = 3, **changes: object) -> Path:
    """Write a tiny model that says printable ASCII only and never ends: a lost or repeated token is a character."""
    from safetensors.torch import load_file, save_file

    make_tiny_model(directory, seed=seed, **changes)
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    spoken = {number for letter, number in vocabulary.items() if letter.isascii() and letter.isprintable()}
    path = directory / "model.safetensors"
    weights = load_file(path)
    for number in set(range(len(weights["lm_head.weight"]))) - spoken:
        weights["lm_head.weight"][number] = 0  # some other is above 0
    save_file(weights, path, metadata={"format": "pt"})
    return directory


class Question(NamedTuple):
    """A prompt, and how many tokens are to follow it."""

    prompt: str
    tokens: int


def make_questions(count: int, prompt: tuple[int, int], tokens: tuple[int, int]) -> list[Question]:
    """Return different questions with prompts and answers of so many characters."""
    chance = random.Random(count)
    return [
        Question("".join(chance.choices("abcdefghijklmnop ", k=chance.randint(*prompt))), chance.randint(*tokens))
        for _ in range(count)
    ]


class Answer(NamedTuple):
    """How a request ended: a text that its end belongs to, or an error and its code."""

    status: int
    text: str
    ended: bool
    code: int
    problem: str
    seconds: float
    request_id: str

    def is_error(self, *codes: int) -> bool:
        """Whether it ended in an error that says so: as the status, or within a stream that had begun."""
        return self.code in codes and self.status in (200, self.code) and not self.ended


def ask(system: System, question: Question, stream: bool) -> Answer:
    """Ask, and wait for the end, at most for `BOUND_S` between two bytes."""
    body = {
        "model": MODEL,
        "prompt": question.prompt,
        "max_tokens": question.tokens,
        "temperature": 0,
        "stream": stream,
    }
    request_id = uuid.uuid4().hex
    began = time.monotonic()
    connection = http.client.HTTPConnection(system.address, system.port, timeout=BOUND_S)
    try:
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        connection.request("POST", COMPLETIONS, json.dumps(body), headers)
        answer = connection.getresponse()
        content = answer.read().decode()
        status = answer.status
    except (http.client.HTTPException, ConnectionError) as error:
        return Answer(NO_REPLY, "", False, NO_REPLY, repr(error), time.monotonic() - began, request_id)
    finally:
        connection.close()
    read = _read_stream if stream and status == 200 else _read_whole
    text, ended, code, problem = read(status, content)
    return Answer(status, text, ended, code, problem, time.monotonic() - began, request_id)


def _read_whole(status: int, content: str) -> tuple[str, bool, int, str]:
    if status != 200:
        return "", False, status, str(error_in(content)["message"])
    [choice] = json.loads(content)["choices"]
    return choice["text"], choice["finish_reason"] == "length", 0, ""


def _read_stream(status: int, content: str) -> tuple[str, bool, int, str]:
    parts, reasons, code, problem = [], [], 0, ""
    events = [line.removeprefix("data: ") for line in content.split("\n") if line.startswith("data: ")]
    for event in events[:-1]:
        chunk = json.loads(event)
        if "error" in chunk:
            code, problem = STATUSES[chunk["error"]["code"]], chunk["error"]["message"]
            continue
        parts += [choice["text"] for choice in chunk["choices"]]
        reasons += [choice["finish_reason"] for choice in chunk["choices"] if choice.get("finish_reason")]
    ended = not problem and reasons == ["length"] and events[-1] == "[DONE]"
    return "".join(parts), ended, code, problem


class Load:
    """Clients that ask one question after the other, half of them for streams, until the block is left."""

    def __init__(self, system: System, texts: Mapping[Question, str], clients: int) -> None:
        self.answers: list[tuple[Question, Answer]] = []
        self._system = system
        self._texts = texts
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if kind is None:
            end = time.monotonic() + BOUND_S
            for thread in self._threads:
                thread.join(max(0.0, end - time.monotonic()))
            assert not any(thread.is_alive() for thread in self._threads), "a request hangs"

    def flow(self, count: int = 10) -> None:
        """Wait until `count` more requests have been answered well."""
        wanted = self.good() + count
        eventually(lambda: self.good() >= wanted, BOUND_S, f"{count} more good answers")

    def good(self) -> int:
        """Return how many answers were right so far."""
        return sum(answer.text == self._texts[question] for question, answer in tuple(self.answers))

    def bad(self, *codes: int) -> list[Answer]:
        """Return the errors, once all are known; everything must be the right text, or an error with these `codes`."""
        errors = []
        for question, answer in self.answers:
            assert answer.seconds <= BOUND_S
            if answer.is_error(*codes):
                assert self._texts[question].startswith(answer.text), "what came before the error is right"
                errors.append(answer)
            else:
                assert answer.ended, answer
                assert answer.text == self._texts[question]
        return errors

    def summary(self) -> str:
        """Return in a line how it went."""
        kinds = Counter((answer.code, answer.status, answer.problem) for _, answer in self.answers)
        longest = max((answer for _, answer in self.answers), key=lambda answer: answer.seconds)
        return f"{self.good()} good, codes {dict(kinds)}, longest {longest.seconds:.1f} s ({longest.request_id})"

    def _run(self, number: int) -> None:
        order = list(self._texts)
        random.Random(number).shuffle(order)
        for turn, question in enumerate(itertools.cycle(order)):
            if self._stop.is_set():
                return
            answer = ask(self._system, question, stream=(number + turn) % 2 == 0)
            self.answers.append((question, answer))
            if not answer.ended:
                time.sleep(0.2)  # like a client that tries again


def reference(system: System, questions: Iterable[Question]) -> dict[Question, str]:
    """Return what the aggregated `system` says."""
    answers = {question: ask(system, question, stream=False) for question in questions}
    assert all(answer.ended and len(answer.text) == question.tokens for question, answer in answers.items())
    return {question: answer.text for question, answer in answers.items()}


def rooms(system: System, worker: int) -> float:
    """Return how many rooms are open at a prefill worker."""
    return system.metric("baton_rooms_open", worker)


def assert_nothing_held(system: System, prefill: int) -> None:
    """No worker has anything in hand, and the first `prefill` hold no room."""
    system.assert_quiet(20)
    for worker in range(prefill):
        eventually(lambda w=worker: rooms(system, w) == 0, what=f"no room is open at worker {worker}")


def kv_files(pid: int, mode: str = "") -> set[str]:
    """Return the files of KV memory that a process maps, by inode; with `mode` those that it maps so ("rw", "r-")."""
    maps = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {fields[4] for fields in maps if "memfd:baton-kv" in " ".join(fields[5:]) and fields[1].startswith(mode)}


def assert_replaced(serve: Serve, worker: int, pid: int, role: str) -> None:
    """A worker is another process, healthy, known to the frontend and serving."""
    eventually(lambda: serve.worker(worker).pid != pid and serve.health(worker) == 200, 60, "a new worker")
    assert_serves(serve, worker, role)


def assert_serves(system: System, worker: int, role: str) -> None:
    """A worker gets requests, and answers them."""
    before = system.ended("completed", worker, role)

    def counted() -> bool:
        ask(system, Question("Are you there?", 2), stream=False)
        return system.ended("completed", worker, role) > before

    eventually(counted, 60, f"the {role} worker {worker} gets requests")


def cut_connections(pid: int, port: int) -> int:
    """Cut the TCP connections of a process at its end `port`, as a network that fails does; return how many."""
    count = 0
    watched = os.pidfd_open(pid)
    try:
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == port:
                count += _shut(watched, connection.fd)
    finally:
        os.close(watched)
    return count


def _shut(watched: int, descriptor: int) -> bool:
    copy = ctypes.CDLL(None).syscall(PIDFD_GETFD, watched, descriptor, 0)
    if copy < 0:
        return False  # it was closed meanwhile
    with socket.socket(fileno=copy) as connection:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True


class Visitor:
    """Somebody who comes to the rooms of a prefill worker by himself, with whatever bytes; if he `beats`, for long."""

    def __init__(self, port: int, *sent: bytes, beats: bool = False) -> None:
        self._over = threading.Event()
        self._connection = socket.create_connection(("127.0.0.1", port), 5)
        self._connection.settimeout(15)
        self._frames = wire.Frames()
        self._heard: list[wire.Message] = []
        self.send(*sent)
        if beats:
            threading.Thread(target=self._beat, daemon=True).start()

    def send(self, *sent: bytes) -> None:
        """Send bytes."""
        self._connection.sendall(b"".join(sent))

    def hear(self) -> wire.Message | None:
        """Return the next message that is no beat, None when the other side has hung up."""
        while True:
            while self._heard:
                message = self._heard.pop(0)
                if not isinstance(message, wire.Heartbeat):
                    return message
            try:
                data = self._connection.recv(65536)
            except ConnectionResetError:
                data = b""
            if not data:
                self.hang_up()
                return None
            self._heard += self._frames.feed(data)

    def hang_up(self) -> None:
        """Leave without a word."""
        self._over.set()
        self._connection.close()

    def _beat(self) -> None:
        while not self._over.wait(0.25):
            try:
                self.send(wire.encode(wire.Heartbeat()))  # short enough to be sent at once
            except OSError:
                return


class Apart(Cluster):
    """A frontend and workers of the built-in engine, each with flags of its own, started without a supervisor."""

    def __init__(self, directory: Path, *arguments: str, own: list[tuple[str, ...]], **options: Any) -> None:
        self._own = own
        super().__init__(directory, *arguments, engine="torch", workers=len(own), **options)

    def start_worker(self, number: int, *more: str) -> Process:
        """See `Cluster.start_worker`."""
        return super().start_worker(number, *self._own[number], *more)


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of these tests."""
    return make_letters_model(tmp_path_factory.mktemp("letters") / MODEL)
