"""The view of a real deployment in a real browser: a chat with its timeline, a stop, a killed worker."""

import base64
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.harness import Serve
from tests.e2e.test_view import view_url

pytestmark = [pytest.mark.view, pytest.mark.timeout(300)]

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def serve(start_shared: Callable[..., Serve]) -> Iterator[Serve]:
    serve = start_shared(Serve, "--echo-pace-ms", "20", prefill=1, decode=2)
    yield serve
    serve.stop()


def ask(page: Any, text: str, max_tokens: int) -> None:
    page.locator("#model option").first.wait_for(state="attached")
    page.get_by_label("Max tokens").fill(str(max_tokens))
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")


def test_an_answer_streams_with_its_timeline_beside_it(serve: Serve, open_page: Open) -> None:
    page = open_page(view_url(serve.process.output), "chat")
    ask(page, "What do you see?", 16)
    page.locator(".message.assistant").get_by_text("What do you see?").wait_for()
    page.get_by_role("button", name="Show its timeline").wait_for()
    timeline = page.get_by_role("region", name="Timeline of the answer")
    for role in ("frontend", "prefill", "decode"):
        timeline.locator(f".lane.role-{role}").first.wait_for()
    timeline.get_by_text("Token gaps").wait_for()


def test_a_stop_reaches_the_engine(serve: Serve, open_page: Open) -> None:
    page = open_page(view_url(serve.process.output), "chat")
    ask(page, "abcdefghijklmnopqrstuvwxyz", 4000)
    page.locator(".message.assistant .bubble").get_by_text("abcdef").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.locator(".stopped").get_by_text(re.compile(r"decode-\d after")).wait_for()
    page.get_by_role("button", name="Send").wait_for()


def test_a_picture_that_the_model_does_not_take_gives_its_error(serve: Serve, open_page: Open) -> None:
    page = open_page(view_url(serve.process.output), "chat", allowed="status of 400")
    red = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
    page.locator("#model option").first.wait_for(state="attached")
    page.locator("input[type=file]").set_input_files(
        {"name": "dot.png", "mimeType": "image/png", "buffer": base64.b64decode(red)}
    )
    page.get_by_alt_text("Attached picture 1").wait_for()
    ask(page, "What is this?", 4)
    page.get_by_alt_text("Picture in the question").wait_for()
    page.locator(".message.assistant .below").last.wait_for(state="attached")


@pytest.mark.timeout(300)
def test_a_worker_that_is_killed_shows_up_and_comes_back(serve: Serve, open_page: Open) -> None:
    page = open_page(view_url(serve.process.output), "topology")
    page.get_by_role("button", name="decode-1, serving").wait_for()
    decode = next(
        child for child in serve.children() if child.environ().get("SUPERVISED_PROCESS_NAME", "").endswith("decode-1")
    )
    decode.send_signal(signal.SIGKILL)
    page.get_by_role("button", name=re.compile("decode-1, (exited|does not reply|starting)")).wait_for()
    page.get_by_role("button", name="decode-1, serving").wait_for(timeout=120_000)
