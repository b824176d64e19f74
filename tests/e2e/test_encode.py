"""Images over HTTP: the frontend has an encode worker do them on the way to the worker that answers."""

import base64
import io
import re
from collections.abc import Callable, Iterator

import pytest
from PIL import Image

from tests.e2e.disagg import Reading
from tests.e2e.harness import Cluster, Process, Serve, System, eventually

pytestmark = pytest.mark.e2e

COMPUTES, ENCODES = 0, 1
OWN = {COMPUTES: ("--media-encoders",), ENCODES: ("--role", "encode")}


class Seeing(Cluster):
    """A frontend, a worker that computes, and one that encodes for it."""

    def start_worker(self, number: int, *more: str) -> Process:
        """See `Cluster.start_worker`."""
        return super().start_worker(number, *OWN[number], *more)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    made = Seeing(tmp_path_factory.mktemp("encode"), "--echo-media", workers=2)
    try:
        made.wait_ready()
        # The frontend learns of the encode worker a moment after it is listed.
        eventually(lambda: ask(made, picture(1, 1)) and encoded(made), what="the encode worker is called")
        yield made
        made.stop()
    finally:
        made.close()


def picture(width: int, height: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def ask(seeing: System, *urls: str, prompt: str = "look") -> tuple[int, str]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": prompt}, *images]
    body = {"model": "echo", "max_tokens": 18, "messages": [{"role": "user", "content": content}]}
    return seeing.post("/v1/chat/completions", body)


def encoded(seeing: System) -> float:
    return seeing.ended("completed", ENCODES, role="encode")


def test_d16_images_go_through_the_encode_worker_and_nothing_is_left(seeing: Seeing) -> None:
    before, rooms = encoded(seeing), Reading(seeing, ENCODES).rooms["done"]
    for number in range(3):
        status, answer = ask(seeing, picture(30 + number, 20), picture(7, 9))
        assert status == 200, answer
        assert f"look[{30 + number}x20][7x9]" in answer
    assert encoded(seeing) == before + 3
    eventually(lambda: Reading(seeing, ENCODES).rooms["done"] == rooms + 3, what="every lease has ended as taken")
    eventually(lambda: not Reading(seeing, ENCODES).held, what="nothing is held")
    seeing.assert_quiet()


def test_text_does_not_go_through_the_encode_worker(seeing: Seeing) -> None:
    before = encoded(seeing)
    status, answer = ask(seeing, prompt="only words")
    assert status == 200, answer
    assert "only words" in answer
    assert encoded(seeing) == before


@pytest.mark.parametrize("stream", [False, True])
def test_images_in_anthropics_blocks_are_seen(seeing: Seeing, stream: bool) -> None:
    url = picture(6, 4)
    inline = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    blocks = [{"type": "image", "source": source} for source in (inline, {"type": "url", "url": url})]
    content = [{"type": "text", "text": "look"}, *blocks]
    body = {"model": "echo", "max_tokens": 14, "messages": [{"role": "user", "content": content}], "stream": stream}
    status, answer = seeing.post("/v1/messages", body)
    assert status == 200, answer
    texts = re.findall(r'"text":"([^"]*)"', answer)
    assert "".join(texts) == "look[6x4][6x4]"


def test_what_is_no_image_is_the_clients_fault_and_named(seeing: Seeing) -> None:
    status, answer = ask(seeing, picture(2, 2), "data:image/png;base64,AAAA")
    assert status == 400, answer
    assert "multi_modal_data.image_url[1]: it is not an image" in answer
    seeing.assert_quiet()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "169.254.169.254"])
def test_nothing_is_fetched_from_inside(seeing: Seeing, host: str) -> None:
    status, answer = ask(seeing, f"http://{host}/secret.png")
    assert status == 400, answer  # by the frontend, which has a policy of its own, or by the worker
    seeing.assert_quiet()


def test_an_encode_worker_is_not_a_model_of_its_own(seeing: Seeing) -> None:
    status, answer = seeing.get("/v1/models")
    assert status == 200
    assert answer.count('"id":"echo"') == 1


def test_one_command_serves_images_with_an_encode_worker(start: Callable[..., Serve]) -> None:
    serve = start(Serve, "--encode", "1", "--echo-media", encoders=1)
    assert "with 1 worker and 1 encode worker" in serve.process.output.read_text()
    eventually(lambda: ask(serve, picture(8, 8))[0] == 200 and encoded(serve) > 0, what="the encode worker is called")
    eventually(lambda: not Reading(serve, ENCODES).held, what="nothing is left")
    serve.stop()
