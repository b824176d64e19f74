"""The control API of real workers: memory, pauses, weights and profiles, while clients send requests."""

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.doubles.tiny_models import make_tiny_model
from tests.e2e.harness import (
    BATON,
    Process,
    Serve,
    System,
    environment,
    eventually,
    fetch,
    free_ports,
    generated_token,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

FLAGS = ("--name", "tiny", "--torch-dtype", "float32", "--torch-blocks", "512", "--torch-threads", "1")
LONG = 600


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    shape = {"hidden_size": 252, "intermediate_size": 1024, "num_hidden_layers": 12, "eos_token_id": None}
    old, new = (tmp_path_factory.mktemp(name) for name in ("old", "new"))
    return make_tiny_model(old, seed=0, **shape), make_tiny_model(new, seed=1, **shape)


@pytest.fixture(scope="module")
def serve(start_shared: Callable[..., Serve], models: tuple[Path, Path]) -> Iterator[Serve]:
    serve = start_shared(Serve, "--model", str(models[0]), *FLAGS, engine="torch")
    yield serve
    serve.stop()


@pytest.fixture(autouse=True)
def serving(request: pytest.FixtureRequest) -> Iterator[None]:
    """A failed test must not leave the shared worker paused for the next."""
    yield
    if "serve" in request.fixturenames:
        serve = request.getfixturevalue("serve")
        execute(serve, "continue")
        execute(serve, "memory/resume", {"tags": ["kv_cache", "weights"]})
        serves_again(serve)


def send(system: System, command: str, body: object = None, worker: int = 0) -> tuple[int, dict[str, Any]]:
    """Send a command; return the status and the reply."""
    status, text = system.system(f"/control/{command}", worker, json.dumps({} if body is None else body).encode())
    return status, json.loads(text)


def execute(system: System, command: str, body: object = None, worker: int = 0) -> dict[str, Any]:
    """Send a command that succeeds; return its outcome."""
    status, reply = send(system, command, body, worker)
    assert status == 200, reply
    return reply


def control_status(system: System, worker: int = 0) -> dict[str, Any]:
    """Return the state of a worker."""
    status, text = system.system("/control/status", worker)
    assert status == 200, text
    return dict(json.loads(text))


def ctl(system: System, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `baton ctl` for the first worker."""
    return subprocess.run(
        [BATON, "ctl", str(system.system_ports[0]), *args],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(variables),
    )


def say(system: System, tokens: int = 24, prompt: str = "once upon a time") -> str:
    answer = system.client(strict=False).completions.create(
        model="tiny", prompt=prompt, max_tokens=tokens, temperature=0
    )
    return answer.choices[0].text


def serves_again(system: System, workers: int = 1) -> None:
    eventually(lambda: system.instances() == workers and system.is_ready(), what="registered again")


class Reader(threading.Thread):
    """A client that reads one long response, in a thread of its own."""

    def __init__(self, system: System) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self.error: openai.OpenAIError | None = None
        self._stream = system.client(strict=False).completions.create(
            model="tiny", prompt="a long story", max_tokens=LONG, temperature=0, stream=True
        )
        self.start()
        eventually(lambda: self.text, what="the first token")

    def run(self) -> None:
        try:
            for chunk in self._stream:
                self.text += chunk.choices[0].text if chunk.choices else ""
        except openai.OpenAIError as error:
            self.error = error

    def whole(self) -> str:
        self.join(60)
        assert not self.is_alive()
        assert self.error is None, self.error
        return self.text


def test_status_has_the_state_of_the_worker(serve: Serve) -> None:
    status = control_status(serve)
    assert (status["weight_version"], status["paused"], status["released"]) == ("initial", False, [])
    assert (status["registered"], status["in_flight"]) == (True, 0)
    assert status["capabilities"]["weight_sources"] == ["disk", "group", "shared_memory", "tensors"]
    printed = ctl(serve, "status", "--json")
    assert (printed.returncode, json.loads(printed.stdout)) == (0, status)


def test_memory_is_released_and_resumed_in_stages(serve: Serve) -> None:
    before = say(serve)
    full = serve.worker().memory_info().rss
    execute(serve, "memory/release", {"tags": ["kv_cache", "weights"]})
    assert full - serve.worker().memory_info().rss > 30e6  # the weights alone are 40 MB
    eventually(lambda: serve.instances() == 0)
    assert serve.health() == 503
    with pytest.raises(openai.APIStatusError) as refusal:
        say(serve)
    assert refusal.value.status_code in (404, 503)
    assert execute(serve, "memory/resume", {"tags": ["weights"]})["released"] == ["kv_cache"]
    time.sleep(0.5)
    assert serve.instances() == 0
    assert execute(serve, "memory/resume", {"tags": ["kv_cache"]})["released"] == []
    serves_again(serve)
    assert serve.health() == 200
    assert say(serve) == before


@pytest.mark.parametrize(
    ("stop", "resume"),
    [
        (("memory/release", {}), ("memory/resume", {})),
        (("pause", {"mode": "keep"}), ("continue", {})),
        (("pause", {"mode": "retract"}), ("continue", {})),
    ],
    ids=["release", "keep", "retract"],
)
def test_a_running_stream_resumes_where_it_stopped(
    serve: Serve, stop: tuple[str, object], resume: tuple[str, object]
) -> None:
    undisturbed = Reader(serve).whole()
    reader = Reader(serve)
    execute(serve, *stop)
    assert control_status(serve)["in_flight"] == 1
    time.sleep(0.3)
    so_far = reader.text
    time.sleep(0.7)
    assert reader.text == so_far
    execute(serve, *resume)
    assert reader.whole() == undisturbed
    assert len(so_far) < len(undisturbed)
    serves_again(serve)


def test_a_pause_with_abort_ends_a_stream_with_an_error(serve: Serve) -> None:
    reader = Reader(serve)
    assert execute(serve, "pause", {"mode": "abort"})["requests"] == 1
    reader.join(30)
    assert isinstance(reader.error, openai.APIError)
    execute(serve, "continue")
    serves_again(serve)
    assert say(serve)


def test_new_weights_change_the_output_and_the_old_ones_restore_it(serve: Serve, models: tuple[Path, Path]) -> None:
    before = say(serve)
    reader = Reader(serve)
    outcome = execute(
        serve, "weights/update", {"source": {"type": "disk", "path": str(models[1])}, "version": "step-100"}
    )
    assert outcome["weight_version"] == "step-100"
    assert control_status(serve)["weight_version"] == "step-100"
    assert reader.whole()
    assert say(serve) != before
    missing = {"source": {"type": "disk", "path": str(models[1] / "no")}, "version": "3"}
    status, answer = send(serve, "weights/update", missing)
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
    assert control_status(serve)["weight_version"] == "step-100"
    execute(serve, "weights/update", {"source": {"type": "disk", "path": str(models[0])}, "version": "step-0"})
    assert say(serve) == before


def test_the_cache_can_be_cleared(serve: Serve) -> None:
    story = "the same long beginning of a story " * 3

    def cached() -> int:
        answer = serve.client(strict=False).completions.create(model="tiny", prompt=story, max_tokens=1)
        details = answer.usage.prompt_tokens_details if answer.usage else None
        return (details.cached_tokens if details else None) or 0

    cached()
    assert cached() > 0
    execute(serve, "cache/clear")
    assert cached() == 0


def test_a_profile_appears_after_its_steps(serve: Serve, tmp_path: Path) -> None:
    path = Path(execute(serve, "profile/start", {"directory": str(tmp_path / "profiles"), "steps": 5})["path"])
    say(serve)
    assert path.parent == tmp_path / "profiles"
    assert eventually(lambda: json.loads(path.read_text())["traceEvents"], what="the profile")
    assert execute(serve, "profile/stop")["path"] == str(path)


def test_d34_naming_a_weight_version_ends_no_request(serve: Serve) -> None:
    reader = Reader(serve)
    before = control_status(serve)["weight_version"]
    assert ctl(serve, "weights/version", "--version", "renamed").returncode == 0
    assert json.loads(serve.system("/control/weights/version")[1])["weight_version"] == "renamed"
    assert control_status(serve)["registered"]
    assert reader.whole() == Reader(serve).whole()
    execute(serve, "weights/version", {"version": before})


def test_d13_drain_lets_requests_finish(serve: Serve) -> None:
    undisturbed = Reader(serve).whole()
    reader = Reader(serve)
    status, answer = send(serve, "pause", {"mode": "drain", "timeout_s": 0.01})
    assert (status, answer["error"]["code"]) == (409, "conflict")
    assert "1 requests still run" in answer["error"]["message"]
    serves_again(serve)
    assert execute(serve, "pause", {"mode": "drain"})["paused"]
    assert reader.whole() == undisturbed
    assert (serve.health(), serve.system("/live")[0]) == (503, 200)
    assert ctl(serve, "continue").stdout.startswith("continued")
    serves_again(serve)


@pytest.mark.parametrize(
    ("command", "body", "status", "code", "message"),
    [
        ("memory/release", {"tags": "weights"}, 422, "invalid_request", "$.tags"),
        ("memory/release", {"tags": ["cuda_graph"]}, 501, "unsupported", "cuda_graph"),
        ("pause", {"mode": "softly"}, 422, "invalid_request", "$.mode"),
        ("pause", [1, 2], 422, "invalid_request", "object"),
        ("pause", {"mood": "keep"}, 422, "invalid_request", "mood"),
        ("profile/stop", {"x": 1}, 422, "invalid_request", "`x`"),
        ("weights/group/leave", {"group": "g"}, 400, "invalid_request", "not in 'g'"),
        ("weights/update", {"source": {"type": "ftp"}, "version": "1"}, 422, "invalid_request", "$.source.type"),
        ("lora/load", {"name": "a", "path": "/a"}, 501, "unsupported", "adapters"),
        ("experts/record/start", None, 501, "unsupported", "experts"),
        ("experts/record/dump", None, 501, "unsupported", "experts"),
        ("dance", {}, 404, "not_found", "dance"),
        ("status", {}, 405, "method_not_allowed", "POST"),
        ("pause", {"mode": "x" * 3_000_000}, 413, "too_large", "bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_command_is_refused_with_the_reason(
    serve: Serve, command: str, body: object, status: int, code: str, message: str
) -> None:
    got, answer = send(serve, command, body)
    assert (got, answer["error"]["code"]) == (status, code)
    assert message in answer["error"]["message"]
    assert control_status(serve)["registered"]


def test_invalid_json_is_refused(serve: Serve) -> None:
    assert serve.system("/control/pause", 0, b"{not json")[0] == 400
    assert say(serve)


def test_ctl_sends_commands_and_exits_by_their_outcome(serve: Serve, models: tuple[Path, Path]) -> None:
    before = say(serve)
    done = ctl(serve, "memory/release", "--tags", "kv_cache,weights")
    assert done.returncode == 0, done.stderr
    assert "released: kv_cache, weights" in done.stdout
    refused = ctl(serve, "weights/update", json.dumps({"source": {"type": "disk", "path": "/m"}, "version": "2"}))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("baton: conflict: ")
    assert ctl(serve, "memory/resume", "--tags", "weights,kv_cache").returncode == 0
    serves_again(serve)
    assert say(serve) == before
    wrong = ctl(serve, "dance")
    assert (wrong.returncode, "no command 'dance'" in wrong.stderr) == (2, True)


def test_without_a_configured_token_one_is_generated_and_ctl_finds_it(serve: Serve) -> None:
    for wrong in ("", "Bearer wrong"):
        status, _ = serve.system("/control/status", headers={"Authorization": wrong})
        assert status == 401
    assert ctl(serve, "status").returncode == 0
    token = generated_token(serve.system_ports[0])
    assert token
    assert all(token not in text for text in serve.logs().values())
    assert serve.system("/live", headers={"Host": "evil.example"})[0] == 403


def test_d34_control_needs_its_token(start: Callable[..., Serve], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    serve = start(Serve, "--control-token-file", str(token), "--system-host", "0.0.0.0")
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert serve.system("/control/status", headers=headers)[0] == 401
        assert serve.system("/control/pause", body=b"{}", headers=headers)[0] == 401
    assert serve.system("/control/status", headers={"Authorization": "Bearer s3cret"})[0] == 200
    for path in ("/live", "/health", "/metrics"):
        assert serve.system(path)[0] == 200
    refused = ctl(serve, "status")
    assert (refused.returncode, "unauthorized" in refused.stderr) == (1, True)
    assert ctl(serve, "status", BATON_CONTROL_TOKEN="s3cret").returncode == 0
    serve.stop()
    assert all("s3cret" not in text for text in serve.logs().values())


def test_an_open_address_takes_no_commands_without_a_token(start: Callable[..., Serve]) -> None:
    serve = start(Serve, "--system-host", "0.0.0.0")
    assert serve.system("/control/status")[0] == 404
    assert serve.system("/health")[0] == 200
    serve.stop()


def test_a_worker_is_live_while_it_loads(tmp_path: Path, models: tuple[Path, Path]) -> None:
    port = free_ports(1)
    worker = Process(
        ["worker", "--engine", "torch", "--model", str(models[0]), *FLAGS, "--system-port", str(port)],
        tmp_path / "worker.log",
        {"BATON_RUNTIME_DIRECTORY": str(tmp_path / "discovery")},
    )
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: fetch(f"{url}/live")[0] == 200, 60, "live")
        status, text = fetch(f"{url}/health")
        assert (status, json.loads(text)["state"]) == (503, "starting")
        assert fetch(f"{url}/control/pause", b"{}")[0] == 503
        eventually(lambda: fetch(f"{url}/health")[0] == 200, 120, "healthy")
        metrics = fetch(f"{url}/metrics")[1]
        assert "baton_requests_total" in metrics
        assert "dynamo_component_requests_total" in metrics
        families = [family.name for family in text_string_to_metric_families(metrics)]
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert len(set(families)) == len(families)
    finally:
        worker.kill()


@pytest.mark.slow
def test_requests_go_to_the_other_worker_while_one_is_paused(
    start: Callable[..., Serve], models: tuple[Path, Path]
) -> None:
    serve = start(Serve, "--model", str(models[0]), *FLAGS, engine="torch", workers=2)
    before = say(serve)
    execute(serve, "memory/release", {"tags": ["kv_cache", "weights"]}, worker=0)
    answers = {say(serve) for _ in range(20)}  # none fails, from the first request on
    assert answers == {before}
    eventually(lambda: serve.instances() == 1)
    execute(serve, "memory/resume", {"tags": ["kv_cache", "weights"]}, worker=0)
    serves_again(serve, 2)
    assert {say(serve) for _ in range(6)} == {before}
    execute(serve, "pause", worker=1)
    serve.stop()  # a paused worker stops like any other
