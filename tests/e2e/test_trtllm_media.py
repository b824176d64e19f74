"""Media on TensorRT-LLM over HTTP: real workers and a frontend; the library is a double that each worker imports.

The double's answer is a function of the prompt and the pixels. Results are compared between layouts, and the number of
tokens of a prompt shows what the double has computed.
"""

import base64
import io
import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.doubles.vision_chat_model import make_vision_chat_model
from tests.e2e.harness import Serve, System, eventually

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tests" / "doubles" / "trtllm_package"
CONTEXT = 512
PATCHES = 16  # of an image of 64 by 64 pixels
TEXT = {"type": "text", "text": "What is it?"}
TYPED = {"type": "text", "text": "<|image|>?"}
ENCODER = 2  # the worker that encodes, where there is one


class Vision:
    """A running system, and the directory in which its doubles share tensors and KV."""

    def __init__(self, system: Serve, world: Path) -> None:
        self.system = system
        self.world = world

    def ask(self, *content: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Return the answer to a message with these parts."""
        status, answer = self.post(*content, **fields)
        assert status == 200, answer
        return json.loads(answer)  # type: ignore[no-any-return]

    def post(self, *content: dict[str, Any], **fields: Any) -> tuple[int, str]:
        """Send a message with these parts; return the status and the body of the answer."""
        body = {"max_tokens": 8, **fields, "model": "vision", "messages": [{"role": "user", "content": list(content)}]}
        body = {name: value for name, value in body.items() if value is not None}
        return self.system.post("/v1/chat/completions", {**body, "temperature": 0, "ignore_eos": True})

    def files(self, kind: str) -> int:
        """Return how many shared tensors ("tensor") or offers of KV ("kv") are left."""
        return len(list(self.world.glob(f"*.{kind}")))


@pytest.fixture(scope="module")
def start_vision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Vision]]:
    model = make_vision_chat_model(tmp_path_factory.mktemp("model") / "vision")
    started: list[Serve] = []

    def start(*arguments: str, **workers: int) -> Vision:
        world = tmp_path_factory.mktemp("world")
        paths = [str(PACKAGE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = {"PYTHONPATH": os.pathsep.join(paths), "TRTLLM_DOUBLE_WORLD": str(world)}
        settings["DYN_MM_ALLOW_INTERNAL"] = "1"  # the frontend has a policy of its own
        directory = tmp_path_factory.mktemp("serve")
        serve = Serve(
            directory,
            "--model",
            str(model),
            "--context-length",
            str(CONTEXT),
            *arguments,
            engine="trtllm",
            settings=settings,
            **workers,  # type: ignore[arg-type]
        )
        started.append(serve)
        serve.wait_ready()
        return Vision(serve, world)

    try:
        yield start
    finally:
        for serve in started:
            serve.close()


@pytest.fixture(scope="module")
def whole(start_vision: Callable[..., Vision]) -> Vision:
    return start_vision(workers=1)


@pytest.fixture(scope="module")
def split(start_vision: Callable[..., Vision]) -> Vision:
    return start_vision("--media-private", "127.0.0.0/8", prefill=1, decode=1)


@pytest.fixture(scope="module")
def encoding(start_vision: Callable[..., Vision]) -> Vision:
    return start_vision("--encode", "1", "--canary-interval-s", "0.2", prefill=1, decode=1, encoders=1)


@pytest.fixture(params=["whole", "split", "encoding"])
def layout(request: pytest.FixtureRequest) -> Vision:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def image(color: str = "red", size: int = 64) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (size, size), color).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def content(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]  # type: ignore[no-any-return]


def encoded(system: System) -> float:
    return system.ended("completed", ENCODER, role="encode")


def test_an_image_is_part_of_the_prompt_and_counted(layout: Vision, whole: Vision) -> None:
    red, blue = layout.ask(TEXT, image("red")), layout.ask(TEXT, image("blue"))
    assert content(red) != content(blue)
    assert red["usage"]["prompt_tokens"] == len(TEXT["text"]) + PATCHES
    assert content(red) == content(whole.ask(TEXT, image("red"))), "every layout computes the same"


def test_d25_every_image_is_used_in_order(layout: Vision) -> None:
    answers = [content(layout.ask(image(one), TEXT, image(other))) for one, other in (("red", "blue"), ("blue", "red"))]
    assert answers[0] != answers[1]
    many = layout.ask(TEXT, *(image(color) for color in ("red", "green", "blue", "white")))
    assert many["usage"]["prompt_tokens"] == len(TEXT["text"]) + 4 * PATCHES


def test_d26_a_placeholder_typed_by_a_client_moves_nothing(layout: Vision) -> None:
    typed = layout.ask(TYPED, image("red"))
    # An invisible character keeps the library from reading it as a placeholder.
    assert typed["usage"]["prompt_tokens"] == len(TYPED["text"]) + 3 + PATCHES
    assert content(typed) != content(layout.ask(TYPED, image("blue")))


def test_without_max_tokens_the_answer_fills_the_context_after_expansion(layout: Vision) -> None:
    usage = layout.ask(TEXT, image(), max_tokens=None)["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == CONTEXT


def test_what_is_no_image_is_the_clients_fault(layout: Vision) -> None:
    status, answer = layout.post(TEXT, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
    assert status == 400, answer
    assert "multi_modal_data.image_url[0]: it is not an image" in answer


def test_nothing_is_left_of_requests_with_images(layout: Vision) -> None:
    for color in ("red", "green", "blue"):
        layout.ask(TEXT, image(color))
    eventually(lambda: layout.files("tensor") == layout.files("kv") == 0, what="no tensor and no KV is held")
    for worker in range(layout.system.workers):
        # Idle prefill engines of the library report no load, so the last one stays.
        eventually(
            lambda w=worker: not layout.system.metric("baton_requests_in_flight", w), what=f"worker {worker} is idle"
        )


def test_d27_media_are_fetched_once_for_prefill_and_decode(split: Vision) -> None:
    picture = base64.b64decode(image()["image_url"]["url"].partition(",")[2])
    fetched: list[str] = []

    class OneUse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if "range" not in self.headers:  # the frontend reads the size of an image from its first bytes
                fetched.append(self.path)
            self.send_response(200 if len(fetched) <= 1 else 410)
            self.end_headers()
            self.wfile.write(picture)

    with ThreadingHTTPServer(("127.0.0.1", 0), OneUse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/one-use.png"
        answer = split.ask(TEXT, {"type": "image_url", "image_url": {"url": url}})
        server.shutdown()
    assert fetched == ["/one-use.png"]
    assert content(answer) == content(split.ask(TEXT, image()))


def test_the_encode_worker_encodes_the_images(encoding: Vision) -> None:
    eventually(lambda: encoding.ask(TEXT, image()) and encoded(encoding.system) > 0, what="the encode worker is called")
    before = encoded(encoding.system)
    encoding.ask(TEXT, image(), image("blue"))
    assert encoded(encoding.system) == before + 1
    encoding.ask(TEXT)
    assert encoded(encoding.system) == before + 1


def test_an_encode_worker_whose_image_processor_fails_is_unhealthy(encoding: Vision) -> None:
    fault = encoding.world / "processor_broken"
    fault.touch()
    try:
        eventually(lambda: encoding.system.health(ENCODER) == 503, what="the encode worker is unhealthy")
        assert "the image processor is broken" in encoding.system.log_of("encode-0")
    finally:
        fault.unlink()
    eventually(lambda: encoding.system.health(ENCODER) == 200, what="the encode worker is healthy again")
