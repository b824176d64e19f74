"""Images over HTTP in every layout: all in one, EP/D, E/PD and E/P/D, over every transport.

The echo engine says what the rows of an image say: its size and a digest of its pixels. So rows or KV that were lost,
mixed up or moved wrongly show in the answer.
"""

import base64
import hashlib
import io
import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from PIL import Image

from tests.e2e.harness import Serve, System, eventually
from tests.e2e.pooled import Pooled

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[2] / "examples"
LAYOUTS: dict[str, dict[str, int]] = {
    "all in one": {},
    "EP/D": {"prefill": 1, "decode": 1},
    "E/PD": {"encoders": 1},
    "E/P/D": {"prefill": 1, "decode": 1, "encoders": 1},
}


def picture(width: int, height: int, colour: tuple[int, int, int] = (200, 30, 40)) -> Image.Image:
    return Image.new("RGB", (width, height), colour)


def url_of(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def said_of(image: Image.Image) -> str:
    """Return what the echo engine says of an image."""
    digest = hashlib.blake2b(image.tobytes(), digest_size=4).hexdigest()
    return f"[{image.width}x{image.height} {digest}]"


def content(*parts: str | Image.Image) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url_of(part)}}
        for part in parts
    ]


def said_to(*parts: str | Image.Image) -> str:
    return "".join(part if isinstance(part, str) else said_of(part) for part in parts)


def ask(system: System, *parts: str | Image.Image, **more: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": "echo", "messages": [{"role": "user", "content": content(*parts)}], **more}
    status, answer = system.post("/v1/chat/completions", body)
    return status, json.loads(answer)


def answer_to(system: System, *parts: str | Image.Image, **more: Any) -> str:
    status, answer = ask(system, *parts, **more)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


def start(directory: Path, layout: str, *more: str) -> Serve:
    """Start the example of a layout."""
    file = EXAMPLES / f"{layout.lower().replace('/', '-').replace(' ', '-')}.yaml"
    return Serve(directory, "--config", str(file), *more, **LAYOUTS[layout])


def encoder_of(layout: str) -> int:
    """Return the number of the worker that encodes."""
    counts = LAYOUTS[layout]
    return 0 if "encoders" not in counts else counts.get("prefill", 0) + counts.get("decode", 0) or 1


def wait_for_encoders(system: System, layout: str) -> None:
    """Wait until the frontend calls the encode worker: it learns of it a moment after it is listed."""
    if "encoders" in LAYOUTS[layout]:
        encoder = encoder_of(layout)
        eventually(
            lambda: answer_to(system, picture(1, 1)) and system.ended("completed", encoder, role="encode"),
            what="the encode worker is called",
        )


def lookups(system: System, worker: int, result: str) -> float:
    return system.metric("baton_media_cache_lookups_total", worker, result=result)


def assert_nothing_is_left(system: System) -> None:
    system.assert_quiet()
    for worker in range(system.workers):
        eventually(lambda w=worker: not system.metric("baton_media_cache_items", w, use="pinned"), what="no rows held")
        for state in ("offered", "claimed"):
            eventually(
                lambda w=worker, s=state: not system.metric("baton_rooms_open", w, state=s), what="no room is open"
            )


@pytest.fixture(scope="module", params=list(LAYOUTS))
def layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Serve]]:
    name = request.param
    system = start(tmp_path_factory.mktemp("layout"), name, "--media-private", "127.0.0.0/8")
    try:
        system.wait_ready()
        wait_for_encoders(system, name)
        yield name, system
        system.stop()
    finally:
        system.close()


def test_images_and_text_in_any_order_are_answered_and_nothing_is_left(layout: tuple[str, Serve]) -> None:
    _, system = layout
    one, two = picture(30, 20), picture(700, 9, (1, 2, 3))
    assert answer_to(system, "look ", one) == said_to("look ", one)
    parts = (one, "then ", two, two, " and <|image|>, typed, ", one)
    assert answer_to(system, *parts) == said_to(*parts)
    assert answer_to(system, "no image, only <|image|>") == "no image, only <|image|>"
    assert_nothing_is_left(system)


def test_the_same_image_is_encoded_once(layout: tuple[str, Serve]) -> None:
    name, system = layout
    encoder = encoder_of(name)
    image = picture(31, 21)
    before = lookups(system, encoder, "miss")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: answer_to(system, f"{number} ", image), range(8)))
    assert answers == [said_to(f"{number} ", image) for number in range(8)]
    assert lookups(system, encoder, "miss") == before + 1
    assert_nothing_is_left(system)


class OneUse(BaseHTTPRequestHandler):
    """Serves each path once."""

    image = b""
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        first = self.path not in self.asked
        self.asked.append(self.path)
        self.send_response(200 if first else 410)
        self.end_headers()
        self.wfile.write(self.image if first else b"")

    def log_message(self, *_: object) -> None: ...


def test_d27_a_url_that_works_once_is_fetched_once(layout: tuple[str, Serve]) -> None:
    name, system = layout
    image = picture(33, 23)
    OneUse.image = base64.b64decode(url_of(image).partition(",")[2])
    path = f"/{name.replace('/', '-').replace(' ', '-')}.png"
    with HTTPServer(("127.0.0.1", 0), OneUse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        part = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{server.server_port}{path}"}}
        body = {"model": "echo", "messages": [{"role": "user", "content": [*content("look "), part]}]}
        status, answer = system.post("/v1/chat/completions", body)
        server.shutdown()
    assert status == 200, answer
    assert json.loads(answer)["choices"][0]["message"]["content"] == said_to("look ", image)
    assert OneUse.asked.count(path) == 1


def test_the_images_of_responses_are_fetched_by_a_worker(layout: tuple[str, Serve]) -> None:
    name, system = layout
    image = picture(36, 26)
    OneUse.image = base64.b64decode(url_of(image).partition(",")[2])
    path = f"/responses-{name.replace('/', '-').replace(' ', '-')}.png"
    with HTTPServer(("127.0.0.1", 0), OneUse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}{path}"
        parts = [{"type": "input_text", "text": "look "}, {"type": "input_image", "image_url": url}]
        body = {"model": "echo", "input": [{"role": "user", "content": parts}]}
        status, answer = system.post("/v1/responses", body)
        server.shutdown()
    assert status == 200, answer
    assert json.loads(answer)["output"][0]["content"][0]["text"] == said_to("look ", image)
    assert OneUse.asked.count(path) == 1


@pytest.mark.parametrize("detail", ["auto", "low", "high"])
def test_the_official_client_sends_images_by_url_and_data_url(layout: tuple[str, Serve], detail: str) -> None:
    name, system = layout
    one, two = picture(34, 24), picture(35, 25)
    OneUse.image = base64.b64decode(url_of(two).partition(",")[2])
    path = f"/{detail}-{name.replace('/', '-').replace(' ', '-')}.png"
    with HTTPServer(("127.0.0.1", 0), OneUse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        urls = (url_of(one), f"http://127.0.0.1:{server.server_port}{path}")
        parts = [{"type": "image_url", "image_url": {"url": url, "detail": detail}} for url in urls]
        answer = system.client().chat.completions.create(
            model="echo", messages=[{"role": "user", "content": [{"type": "text", "text": "see "}, *parts]}]
        )
        server.shutdown()
    assert answer.choices[0].message.content == said_to("see ", one, two)


def test_leaving_while_an_image_is_fetched_ends_the_fetch(layout: tuple[str, Serve]) -> None:
    _, system = layout
    with socket.create_server(("127.0.0.1", 0)) as site:
        site.settimeout(30)
        url = f"http://127.0.0.1:{site.getsockname()[1]}/never.png"
        part = {"type": "image_url", "image_url": {"url": url}}
        body = {"model": "echo", "messages": [{"role": "user", "content": [part]}], "stream": True}
        with system.open("/v1/chat/completions", body):
            connection, _ = site.accept()
        with connection:
            connection.settimeout(15)
            while connection.recv(4096):  # the request, and then the end
                pass
    assert_nothing_is_left(system)


def test_usage_counts_the_rows_of_images(layout: tuple[str, Serve]) -> None:
    _, system = layout
    image = picture(32, 22)
    _, answer = ask(system, "look ", image, max_tokens=4)
    rows = -(-len(said_of(image)[1:-1]) // 4)
    assert answer["usage"]["prompt_tokens"] == len("look ") + len("[]") + rows, answer


@pytest.mark.parametrize("stream", [False, True])
def test_images_in_anthropics_blocks_are_seen(layout: tuple[str, Serve], stream: bool) -> None:
    _, system = layout
    image = picture(6, 4)
    inline = {"type": "base64", "media_type": "image/png", "data": url_of(image).partition(",")[2]}
    blocks = [{"type": "image", "source": source} for source in (inline, {"type": "url", "url": url_of(image)})]
    messages = [{"role": "user", "content": [{"type": "text", "text": "look"}, *blocks]}]
    expected = said_to("look", image, image)
    body = {"model": "echo", "max_tokens": len(expected), "messages": messages, "stream": stream}
    status, answer = system.post("/v1/messages", body)
    assert status == 200, answer
    assert "".join(re.findall(r'"text":"([^"]*)"', answer)) == expected


def test_what_is_no_image_is_the_clients_fault(layout: tuple[str, Serve]) -> None:
    _, system = layout
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"model": "echo", "messages": [{"role": "user", "content": [*content(picture(2, 2)), part]}]}
    status, answer = system.post("/v1/chat/completions", body)
    assert status == 400, answer
    assert "multi_modal_data.image_url[1]: it is not an image" in answer
    assert_nothing_is_left(system)


def test_text_does_not_go_through_the_encode_worker(layout: tuple[str, Serve]) -> None:
    name, system = layout
    before = system.ended("completed", encoder_of(name), role="encode")
    assert answer_to(system, "only words") == "only words"
    assert system.ended("completed", encoder_of(name), role="encode") == before


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "169.254.169.254"])
def test_nothing_is_fetched_from_inside(layout: tuple[str, Serve], host: str) -> None:
    _, system = layout
    part = {"type": "image_url", "image_url": {"url": f"http://{host}/secret.png"}}
    body = {"model": "echo", "messages": [{"role": "user", "content": [part]}]}
    status, answer = system.post("/v1/chat/completions", body)
    assert status == 400, answer  # by the frontend, which has a policy of its own, or by the worker
    assert_nothing_is_left(system)


def test_every_layout_is_one_model_and_says_its_workers(layout: tuple[str, Serve]) -> None:
    name, system = layout
    status, answer = system.get("/v1/models")
    assert status == 200
    assert answer.count('"id":"echo"') == 1
    workers = "1 prefill and 1 decode workers" if "prefill" in LAYOUTS[name] else "1 worker"
    encoders = " and 1 encode worker" if "encoders" in LAYOUTS[name] else ""
    assert f"with {workers}{encoders} " in system.process.output.read_text()


TOPOLOGY = {
    "mode": "disaggregated",
    "settings": {"engine": "echo", "name": "echo", "echo": {"media": True}},
    "prefill": {"pools": [{"name": "one", "workers": {"count": 1}}]},
    "decode": {"pools": [{"name": "one", "workers": {"count": 1}}]},
}


def test_prefill_decode_and_encode_workers_behind_a_global_router(tmp_path: Path) -> None:
    system = Pooled(tmp_path, TOPOLOGY, workers=3, arguments=("--encode", "1"))
    prefill, decode, encoder = 1, 2, 3
    try:
        system.wait_ready()
        image = picture(30, 20)
        eventually(
            lambda: answer_to(system, picture(1, 1)) and system.ended("completed", encoder, role="encode"),
            what="the encode worker is called",
        )
        before = lookups(system, encoder, "miss")
        parts = ("look ", image, "and <|image|> ", image)
        assert answer_to(system, *parts) == said_to(*parts)
        assert lookups(system, encoder, "miss") == before + 1
        assert system.ended("completed", prefill, role="prefill") >= 2
        assert system.ended("completed", decode, role="decode") >= 2
        system.stop()
    finally:
        system.close()
