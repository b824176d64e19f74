"""Commands on a running `baton serve`: logs, scale, drain, and the names of its processes."""

import json
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import BATON, STOP_S, Serve, echoed, environment, eventually

pytestmark = [pytest.mark.e2e]

PROMPT = "Count the stars. "


def baton(serve: Serve, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command on `serve` until it ends."""
    return subprocess.run(
        [BATON, *arguments, "--port", str(serve.port)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(),
        check=False,
    )


def names(serve: Serve) -> set[str]:
    """Return the names of the processes, as `ps` shows them."""
    titles = [child.cmdline() for child in serve.children()]
    return {title[2] if title[1] == "worker" else title[1] for title in titles if title[:1] == ["baton"]}


@pytest.fixture(scope="module")
def disaggregated(start_shared: Callable[..., Serve]) -> Serve:
    """A prefill and a decode worker of slow answers."""
    return start_shared(Serve, "--echo-pace-ms", "20", "--drain-timeout-s", "60", prefill=1, decode=1)


def test_it_says_what_it_starts_and_where_it_is(disaggregated: Serve) -> None:
    text = disaggregated.process.output.read_text()
    assert text.startswith("Starting echo with 1 prefill and 1 decode workers (engine echo)\n")
    ready = [line.split() for line in text.splitlines() if " ready after " in line]
    assert sorted(line[0] for line in ready) == ["decode-0", "frontend", "prefill-0"]
    by_name = {line[0]: line[-1] for line in ready}
    assert by_name["prefill-0"] == f"http://127.0.0.1:{disaggregated.system_ports[0]}"
    for title, address in {
        "API": f"{disaggregated.url}/v1",
        "Metrics": f"{disaggregated.url}/metrics",
        "Logs": str(disaggregated.directory),
    }.items():
        assert any(line.split()[:1] == [title] and address in line for line in text.splitlines())


def test_titles_of_processes_have_role_and_model(disaggregated: Serve) -> None:
    titles = {" ".join(child.cmdline()) for child in disaggregated.children()}
    assert {"baton worker prefill-0 echo", "baton worker decode-0 echo"} <= titles
    assert f"baton frontend echo port {disaggregated.port}" in titles
    assert {"baton:frontend", "baton:prefill-0", "baton:decode-0"} <= {each.name() for each in disaggregated.children()}
    assert psutil.Process(disaggregated.process.pid).cmdline() == ["baton", "serve", "echo"]


def test_workers_are_added_restarted_and_drained_while_requests_run(disaggregated: Serve) -> None:
    serve = disaggregated
    done = baton(serve, "scale", "decode=3", "prefill=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "now prefill=2, decode=3"
    expected = {"frontend", "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"}
    eventually(lambda: names(serve) == expected, what="the new processes")
    eventually(lambda: serve.instances() == 5, what="the frontend knows them")

    killed = next(child for child in serve.children() if child.cmdline()[2:3] == ["decode-2"])
    killed.kill()
    eventually(lambda: killed.pid not in {each.pid for each in serve.children()}, what="it is gone")
    eventually(lambda: names(serve) == expected and serve.instances() == 5, 30, "the new count survives a restart")

    answers: list[str] = []

    def ask() -> None:
        answer = serve.client().completions.create(model="echo", prompt=PROMPT, max_tokens=150)
        answers.append(answer.choices[0].text)

    asking = [threading.Thread(target=ask) for _ in range(6)]
    for thread in asking:
        thread.start()
    ports = [serve.port + 1 + number for number in range(5)]
    eventually(lambda: sum(_in_flight(port) for port in ports) >= 6, what="requests run")
    done = baton(serve, "scale", "decode=1", "prefill=1")
    assert done.returncode == 0, done.stderr
    assert {"decode-2: draining", "decode-2: stopped", "prefill-1: stopped"} <= set(done.stdout.splitlines())
    assert done.stdout.splitlines()[-1] == "now prefill=1, decode=1"
    for thread in asking:
        thread.join(STOP_S)
    assert answers == [echoed(PROMPT, 150)] * 6
    assert names(serve) == {"frontend", "prefill-0", "decode-0"}
    assert serve.post("/v1/completions", {"model": "echo", "prompt": "hi", "max_tokens": 4})[0] == 200


def _in_flight(port: int) -> int:
    status, text = _health(port)
    return int(json.loads(text)["in_flight"]) if status else 0


def _health(port: int) -> tuple[int, str]:
    from tests.e2e.harness import fetch

    try:
        return fetch(f"http://127.0.0.1:{port}/health")
    except OSError:
        return 0, ""


@pytest.mark.slow
def test_a_drained_worker_can_start_again(disaggregated: Serve) -> None:
    before = next(child.pid for child in disaggregated.children() if "decode-0" in child.cmdline())
    done = baton(disaggregated, "drain", "decode-0", "--restart")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "now prefill=1, decode=1"
    after = next(child.pid for child in disaggregated.children() if "decode-0" in child.cmdline())
    assert before != after


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("scale", "decode=0"), ("decode=0", "1 to 256", "stop `baton serve`")),
        (("scale", "decode=many"), ("decode=many", "ROLE=COUNT")),
        (("scale", "worker=2"), ("worker", "prefill, decode", "--prefill")),
        (("drain", "decode-0"), ("last", "baton scale decode=2", "--restart")),
        (("drain", "frontend"), ("frontend", "prefill-0, decode-0")),
        (("logs", "encode"), ("encode", "decode-0")),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_cannot_be_done_is_refused_with_what_can(
    disaggregated: Serve, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = baton(disaggregated, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    for word in words:
        assert word in done.stderr


def test_logs_of_a_role_or_of_all(disaggregated: Serve) -> None:
    one = baton(disaggregated, "logs", "decode-0")
    assert one.returncode == 0, one.stderr
    assert "health and metrics on" in one.stdout
    assert not one.stdout.startswith("decode-0 ")
    every = baton(disaggregated, "logs", "-n", "1000").stdout
    assert {line.split()[0] for line in every.splitlines()} >= {"frontend", "prefill-0", "decode-0"}
    assert baton(disaggregated, "logs", "prefill", "-n", "3").stdout.count("\n") == 3


@pytest.mark.slow
def test_new_lines_of_logs_are_followed_until_the_end(start: Callable[..., Serve], tmp_path: Path) -> None:
    serve = start(Serve)
    output = tmp_path / "followed"
    with output.open("wb") as file:
        command = [BATON, "logs", "-f", "-n", "0", "--port", str(serve.port)]
        following = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=environment())
    try:
        # It begins at the end of the logs, at a time that we do not know.
        request = {"model": "echo", "prompt": "hi", "max_tokens": 4}
        eventually(
            lambda: serve.post("/v1/completions", request)[0] == 200 and "worker-0" in output.read_text(),
            what="the lines of requests",
        )
        assert baton(serve, "scale", "worker=2").returncode == 0
        eventually(lambda: "worker-1" in output.read_text(), what="the log of a new worker")
        serve.stop()
        assert following.wait(STOP_S) == 0
    finally:
        following.kill()
    assert "has ended" in output.read_text()
    after = baton(serve, "logs", "worker-0", "--log-dir", str(serve.directory))
    assert "health and metrics on" in after.stdout


def test_a_second_instance_is_refused_with_what_to_do(disaggregated: Serve) -> None:
    done = baton(disaggregated, "serve", "--engine", "echo")
    assert (done.returncode, done.stdout) == (2, "")
    for word in (f"pid {disaggregated.process.pid}", disaggregated.url, "baton chat", "--port"):
        assert word in done.stderr


@pytest.mark.process
def test_without_a_running_serve_commands_say_how_to_start_one(tmp_path: Path) -> None:
    for command in (("scale", "decode=2"), ("drain", "decode-0")):
        done = subprocess.run(
            [BATON, *command],
            capture_output=True,
            text=True,
            timeout=20,
            env=environment({"XDG_CACHE_HOME": str(tmp_path)}),
            check=False,
        )
        assert done.returncode == 2
        assert "start one with `baton serve`" in done.stderr


@pytest.mark.slow
def test_it_stops_with_scaled_workers(start: Callable[..., Serve]) -> None:
    serve = start(Serve, workers=1)
    assert baton(serve, "scale", "workers=2").returncode == 0
    children = serve.children()
    serve.process.signal(signal.SIGTERM)
    assert serve.process.wait() == 0
    assert not [child for child in children if child.is_running()]
