"""KV-aware routing of images: a picture goes to the worker that has computed it."""

import base64
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.e2e.harness import Serve, eventually
from tests.vision_models import make_tiny_qwen25vl, noise_png

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

WORKERS = 2
MOST_PICTURES = 40  # of which one is bound to go to each worker
ROWS = 16  # of a picture of 112 x 112 pixels


@pytest.fixture(scope="module")
def routed(start_shared: Callable[..., Serve], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    directory = make_tiny_qwen25vl(tmp_path_factory.mktemp("models") / "seeing")
    flags = ("--model", str(directory), "--router", "kv", "--torch-dtype", "float32", "--torch-threads", "1")
    serve = start_shared(Serve, *flags, engine="torch", workers=WORKERS)
    yield serve
    serve.stop()


def ask(serve: Serve, picture: int, question: str = " What is that?") -> Any:
    """Ask about a picture that comes before everything that tells questions apart; return the usage."""
    url = "data:image/png;base64," + base64.b64encode(noise_png(112, 112, picture)).decode()
    content: list[Any] = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    answer = serve.client().chat.completions.create(
        model="seeing", messages=[{"role": "user", "content": content}], max_tokens=2
    )
    return answer.usage


def cached(serve: Serve, picture: int, question: str) -> int:
    return int(ask(serve, picture, question).prompt_tokens_details.cached_tokens or 0)


def served(serve: Serve) -> list[float]:
    return [serve.ended("completed", worker) for worker in range(WORKERS)]


def test_a_picture_goes_to_the_worker_that_has_it_and_another_one_shares_nothing(routed: Serve) -> None:
    pictures = 0
    while pictures < 4 or not all(served(routed)):
        assert pictures < MOST_PICTURES, "a worker is left out"
        pictures += 1
        usage = ask(routed, pictures)
        assert usage.prompt_tokens > ROWS, "rows count as tokens of the prompt"
        assert not usage.prompt_tokens_details.cached_tokens, "different pictures share no block"
    for picture in range(1, pictures + 1):
        # The router hears of blocks a moment after they are there.
        eventually(lambda p=picture: cached(routed, p, " And this?") >= ROWS, what="the picture is found")
        before = served(routed)
        assert all(cached(routed, picture, question) >= ROWS for question in (" a", " b", " c"))
        gained = sorted(after - was for was, after in zip(before, served(routed), strict=True))
        assert gained == [0, 3], "one worker took all three"
