"""Operators' orders over HTTP to real workers: memory, pauses, weights and profiles, while clients ask for answers."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from baton.testing.tiny import make_tiny_model
from e2e.harness import Serve, System, eventually, fetch

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
def awake(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails must not leave the shared worker idle for the next."""
    yield
    if "serve" in request.fixturenames:
        serve = request.getfixturevalue("serve")
        obey(serve, "continue")
        obey(serve, "resume_memory", {"tags": ["kv_cache", "weights"]})
        serves_again(serve)


def order(system: System, verb: str, body: object = None, worker: int = 0) -> dict[str, Any]:
    """Give an order; return the answer, whatever it is."""
    status, text = post(system, f"/engine/control/{verb}", json.dumps({} if body is None else body), worker)
    assert status == 200, text
    answer: dict[str, Any] = json.loads(text)
    return answer


def obey(system: System, verb: str, body: object = None, worker: int = 0) -> dict[str, Any]:
    """Give an order that is carried out."""
    answer = order(system, verb, body, worker)
    assert answer["status"] == "ok", answer
    return answer


def post(system: System, path: str, body: str, worker: int = 0) -> tuple[int, str]:
    return fetch(f"http://127.0.0.1:{system.system_ports[worker]}{path}", body.encode())


def say(system: System, tokens: int = 24, prompt: str = "once upon a time") -> str:
    answer = system.client(strict=False).completions.create(
        model="tiny", prompt=prompt, max_tokens=tokens, temperature=0
    )
    return answer.choices[0].text


def serves_again(system: System, workers: int = 1) -> None:
    eventually(lambda: system.instances() == workers and system.is_ready(), what="back in discovery")


class Reader(threading.Thread):
    """A client that reads one long answer, in a thread of its own."""

    def __init__(self, system: System) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self.error: openai.OpenAIError | None = None
        self._stream = system.client(strict=False).completions.create(
            model="tiny", prompt="a long story", max_tokens=LONG, temperature=0, stream=True
        )
        self.start()
        eventually(lambda: self.text, what="the answer begins")

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


def test_status_tells_where_a_worker_stands_by_get_too(serve: Serve) -> None:
    status = obey(serve, "status")
    assert (status["weight_version"], status["paused"], status["released"]) == ("initial", False, [])
    assert (status["listed"], status["in_flight"]) == (True, 0)
    assert status["capabilities"]["weight_sources"] == ["disk", "group", "shared_memory", "tensors"]
    assert json.loads(serve.system("/engine/control/status")[1]) == status


def test_memory_goes_and_comes_back_in_stages_and_so_does_the_worker(serve: Serve) -> None:
    before = say(serve)
    full = serve.worker().memory_info().rss
    obey(serve, "release_memory", {"tags": ["kv_cache", "weights"]})
    assert full - serve.worker().memory_info().rss > 30e6  # the weights alone are 40 MB
    eventually(lambda: serve.instances() == 0)
    assert serve.health() == 503
    with pytest.raises(openai.APIStatusError) as refusal:
        say(serve)
    assert refusal.value.status_code in (404, 503)
    assert obey(serve, "resume_memory", {"tags": ["weights"]})["released"] == ["kv_cache"]
    time.sleep(0.5)
    assert serve.instances() == 0
    assert obey(serve, "resume_memory", {"tags": ["kv_cache"]})["released"] == []
    serves_again(serve)
    assert serve.health() == 200
    assert say(serve) == before


@pytest.mark.parametrize(
    ("go", "back"),
    [
        (("release_memory", {"tags": ["kv_cache", "weights"]}), ("resume_memory", {"tags": ["kv_cache", "weights"]})),
        (("pause", {"mode": "keep"}), ("continue", {})),
        (("pause", {"mode": "retract"}), ("continue", {})),
    ],
    ids=["release", "keep", "retract"],
)
def test_an_answer_that_was_on_its_way_goes_on_where_it_was(
    serve: Serve, go: tuple[str, object], back: tuple[str, object]
) -> None:
    undisturbed = Reader(serve).whole()
    reader = Reader(serve)
    obey(serve, *go)
    assert obey(serve, "status")["in_flight"] == 1
    time.sleep(0.3)
    so_far = reader.text
    time.sleep(0.7)
    assert reader.text == so_far
    obey(serve, *back)
    assert reader.whole() == undisturbed
    assert len(so_far) < len(undisturbed)
    serves_again(serve)


def test_a_pause_that_aborts_ends_an_answer_with_an_error(serve: Serve) -> None:
    reader = Reader(serve)
    assert obey(serve, "pause", {"mode": "abort"})["requests"] == 1
    reader.join(30)
    assert isinstance(reader.error, openai.APIError)
    obey(serve, "continue")
    serves_again(serve)
    assert say(serve)


def test_new_weights_change_the_answers_and_the_old_ones_bring_them_back(
    serve: Serve, models: tuple[Path, Path]
) -> None:
    before = say(serve)
    reader = Reader(serve)
    outcome = obey(serve, "update_weights", {"source": {"type": "disk", "path": str(models[1])}, "version": "step-100"})
    assert outcome["weight_version"] == "step-100"
    assert obey(serve, "status")["weight_version"] == "step-100"
    assert reader.whole()
    assert say(serve) != before
    bad = order(serve, "update_weights", {"source": {"type": "disk", "path": str(models[1] / "no")}, "version": "3"})
    assert (bad["status"], bad["code"]) == ("error", "invalid_request")
    assert obey(serve, "status")["weight_version"] == "step-100"
    obey(serve, "update_weights", {"source": {"type": "disk", "path": str(models[0])}, "version": "step-0"})
    assert say(serve) == before


def test_the_cache_can_be_cleared(serve: Serve) -> None:
    story = "the same long beginning of a story " * 3

    def cached() -> int:
        answer = serve.client(strict=False).completions.create(model="tiny", prompt=story, max_tokens=1)
        details = answer.usage.prompt_tokens_details if answer.usage else None
        return (details.cached_tokens if details else None) or 0

    cached()
    assert cached() > 0
    obey(serve, "clear_cache")
    assert cached() == 0


def test_a_profile_appears_after_its_steps(serve: Serve, tmp_path: Path) -> None:
    path = Path(obey(serve, "start_profile", {"directory": str(tmp_path / "profiles"), "steps": 5})["path"])
    say(serve)
    assert path.parent == tmp_path / "profiles"
    assert eventually(lambda: json.loads(path.read_text())["traceEvents"], what="the profile")
    assert obey(serve, "stop_profile")["path"] == str(path)


@pytest.mark.parametrize(
    ("verb", "body", "code", "complaint"),
    [
        ("release_memory", {}, "invalid_request", "`tags`"),
        ("release_memory", {"tags": ["cuda_graph"]}, "unsupported", "cuda_graph"),
        ("pause", {"mode": "softly"}, "invalid_request", "$.mode"),
        ("pause", [1, 2], "invalid_request", "object"),
        ("pause", {"mood": "keep"}, "invalid_request", "mood"),
        ("stop_profile", {"x": 1}, "invalid_request", "`x`"),
        ("leave_group", {"group": "g"}, "invalid_request", "not in 'g'"),
        ("update_weights", {"source": {"type": "ftp"}, "version": "1"}, "invalid_request", "$.source.type"),
    ],
)
def test_a_bad_body_is_told_what_is_wrong_with_it(
    serve: Serve, verb: str, body: object, code: str, complaint: str
) -> None:
    answer = order(serve, verb, body)
    assert (answer["status"], answer["code"]) == ("error", code)
    assert complaint in answer["message"]
    assert obey(serve, "status")["listed"]


def test_what_is_no_order_at_all_is_refused_by_the_server(serve: Serve) -> None:
    assert post(serve, "/engine/control/dance", "{}")[0] == 404
    assert post(serve, "/engine/control/pause", "{not json")[0] == 400
    assert post(serve, "/engine/control/pause", json.dumps({"mode": "x" * 3_000_000}))[0] == 413
    assert say(serve)


def test_requests_go_to_the_other_worker_while_one_is_idle(
    start: Callable[..., Serve], models: tuple[Path, Path]
) -> None:
    serve = start(Serve, "--model", str(models[0]), *FLAGS, engine="torch", workers=2)
    before = say(serve)
    obey(serve, "release_memory", {"tags": ["kv_cache", "weights"]}, worker=0)
    answers = {say(serve) for _ in range(20)}  # from the first moment on, none fails
    assert answers == {before}
    eventually(lambda: serve.instances() == 1)
    obey(serve, "resume_memory", {"tags": ["kv_cache", "weights"]}, worker=0)
    serves_again(serve, 2)
    assert {say(serve) for _ in range(6)} == {before}
    obey(serve, "pause", worker=1)
    serve.stop()  # an idle worker stops like any other
