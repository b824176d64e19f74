"""Hostile media over HTTP: the status, the reason, and that the next request works. `docs/media.md` has all cases."""

import io
import os
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from tests.e2e.harness import Serve
from tests.unit.media.embedding_files import floats, safetensors
from tests.unit.media.media_sites import data_url, png, png_that_claims

pytestmark = pytest.mark.e2e

REQUEST_BYTES = 400_000
ITEM = "multi_modal_data.image_url[0]"


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    directory = tmp_path_factory.mktemp("media")
    allowed = directory / "allowed"
    allowed.mkdir()
    (allowed / "picture.png").write_bytes(png(30, 20))
    (allowed / "rows.safetensors").write_bytes(safetensors(rows=floats([1, 1], 1.0)))
    (directory / "secret.png").write_bytes(png(9, 9))
    (allowed / "link.png").symlink_to("../secret.png")
    os.mkfifo(allowed / "pipe.png")
    # As many bytes for all requests as for one: whoever does not give them back stops the next request.
    limits = ("--media-max-request-bytes", str(REQUEST_BYTES), "--media-max-total-bytes", str(REQUEST_BYTES))
    made = Serve(directory, "--echo-media", "--media-local-dirs", str(allowed), "--media-timeout-s", "20", *limits)
    try:
        made.wait_ready()
        yield made
        made.stop()
    finally:
        made.close()


def ask(serve: Serve, *urls: str) -> tuple[int, str]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": "look"}, *images]
    body = {"model": "echo", "max_tokens": 60, "messages": [{"role": "user", "content": content}]}
    return serve.post("/v1/chat/completions", body)


def local(serve: Serve, name: str) -> str:
    return f"file://{serve.directory}/allowed/{name}"


def noise(side: int) -> bytes:
    """Return a picture that cannot be compressed: 3 bytes for each pixel."""
    file = io.BytesIO()
    Image.frombytes("RGB", (side, side), random.Random(side).randbytes(3 * side * side)).save(file, "PNG")
    return file.getvalue()


def test_a_local_file_is_taken(serve: Serve) -> None:
    status, answer = ask(serve, local(serve, "picture.png"), data_url(png(7, 9)))
    assert status == 200, answer
    assert re.search(r"look\[30x20 \w+\]\[7x9 \w+\]", answer), answer


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64", "the data URL has no data"),
        ("data:image/png;base64,@@@@", "the data URL is not base64"),
        (data_url(b"<html>"), "it is not an image in a supported format"),
        (data_url(png(300, 200)[:200]), "cannot read the image"),
        (data_url(png_that_claims(65_535, 65_535)), "exceed the limit of 50000000 for an image"),
        (data_url(png(1, 201)), "too narrow"),
        (data_url(b"PK\x03\x04"), "PyTorch and pickle files are refused"),
        (data_url(b"\xff" * 8 + b"{}", "application/safetensors"), "its header is longer than the file"),
        ("rows.safetensors", "rows of 1 numbers; those of this model have"),
        ("file:///etc/passwd", "there is no such file"),
        ("../secret.png", "there is no such file"),
        ("link.png", "there is no such file"),
        ("pipe.png", "it is not a regular file"),
        ("http://media.invalid/a.png", "the host cannot be found"),
        ("https://media.invalid/a.pt", "PyTorch and pickle files are refused"),
    ],
    ids=lambda text: text[:60],
)
def test_hostile_media_are_refused_by_name_and_the_next_request_works(serve: Serve, url: str, reason: str) -> None:
    status, answer = ask(serve, url if ":" in url else local(serve, url))
    assert status == 400, answer
    assert f"{ITEM}: " in answer
    assert reason in answer
    status, answer = ask(serve, data_url(png(6, 5)))
    assert status == 200, answer
    assert "look[6x5 " in answer


def test_the_bytes_of_a_request_are_limited_together(serve: Serve) -> None:
    picture = data_url(noise(250))
    status, answer = ask(serve, picture, picture, picture)
    assert status == 400, answer
    assert f"exceed the limit of {REQUEST_BYTES} bytes for a request" in answer


def test_requests_wait_for_bytes_and_give_them_back(serve: Serve) -> None:
    picture, broken = data_url(noise(250)), data_url(noise(250)[:-5000])
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda number: ask(serve, broken if number % 4 == 0 else picture), range(24)))
    assert [status for status, _ in answers] == [400 if number % 4 == 0 else 200 for number in range(24)], answers
    serve.assert_quiet()
