"""Each page used as a person would, in a real browser, on a deployment of fake processes that a test can break."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.view.fake_deployment import disaggregated
from tests.view.fake_thread import FakeThread

pytestmark = [pytest.mark.view, pytest.mark.timeout(300)]

Open = Callable[..., Any]


def now_us() -> int:
    return time.time_ns() // 1000


@pytest.fixture
def deployment() -> Iterator[FakeThread]:
    fake = disaggregated(1, 2, pools=("fast", "long"))
    fake.history(240, 0.5)
    with FakeThread(fake).running() as running:
        yield running


def test_the_topology_shows_every_process_and_its_panel_gives_commands(deployment: FakeThread, open_page: Open) -> None:
    page = open_page(deployment.url, "topology")
    for process in deployment.fake.processes:
        page.get_by_role("button", name=process.name.removeprefix("8000/")).first.wait_for()
    page.get_by_role("button", name="decode-fast-0, serving").click()
    drawer = page.get_by_role("complementary", name="Process")
    drawer.get_by_text("Settings that differ from their defaults").wait_for()
    drawer.get_by_role("button", name="Drain").click()
    assert not deployment.fake.of("decode")[0].commands, "it asks first"
    drawer.get_by_role("button", name="Really drain?").click()
    drawer.get_by_text("pause is done").wait_for()
    assert deployment.fake.of("decode")[0].commands == [("pause", {"mode": "drain"})]
    page.get_by_role("button", name="decode-fast-0, paused").wait_for()
    drawer.get_by_role("button", name="Continue").click()
    page.get_by_role("button", name="decode-fast-0, serving").wait_for()
    page.keyboard.press("Escape")
    assert drawer.is_hidden()


def test_a_worker_that_ends_while_the_page_is_open_shows_up(deployment: FakeThread, open_page: Open) -> None:
    page = open_page(deployment.url, "topology")
    page.get_by_role("button", name="decode-fast-1, serving").wait_for()
    ended = next(process for process in deployment.fake.processes if process.name.endswith("decode-fast-1"))
    deployment.fake.processes.remove(ended)
    deployment.run(ended.stop)
    page.get_by_role("button", name="decode-fast-1, exited").wait_for()
    page.get_by_text("1 not serving").wait_for()
    deployment.run(ended.start)
    deployment.fake.processes.append(ended)
    page.get_by_role("button", name="decode-fast-1, serving").wait_for()


def test_a_failed_request_shows_its_error_where_it_happened(deployment: FakeThread, open_page: Open) -> None:
    page = open_page(deployment.url, "requests")
    trace_id = deployment.fake.begin(now_us(), "failed")
    page.get_by_role("button", name="Failed").click()
    page.get_by_role("button", name=f"failed request {trace_id[:10]}").click()
    detail = page.get_by_role("article", name="Request")
    detail.locator(".callout").get_by_text("engine_failed").wait_for()
    traces = {process.name: {hop.trace for hop in process.finished} for process in deployment.fake.of("prefill")}
    failed = next(name for name, finished in traces.items() if trace_id in finished)
    assert failed.removeprefix("8000/") in detail.locator(".callout").inner_text()
    assert detail.locator(".lane.role-prefill .mark.error").count() == 1
    assert detail.locator("code").inner_text() == trace_id
    detail.get_by_role("button", name="Copy the trace id").click()


def test_a_request_is_followed_while_it_runs(deployment: FakeThread, open_page: Open) -> None:
    page = open_page(deployment.url, "requests")
    trace_id = deployment.fake.begin(now_us(), "long")
    page.get_by_role("button", name="Running").click()
    page.get_by_role("button", name=f"running request {trace_id[:10]}").click()
    detail = page.get_by_role("article", name="Request")
    detail.locator(".lane.role-decode .seg-decode").first.wait_for()
    detail.get_by_text("Token gaps").wait_for()
    detail.locator("summary").click()
    detail.get_by_role("cell", name="kv moved").wait_for()


def test_requests_are_found_by_words_and_slow_ones_by_their_filter(deployment: FakeThread, open_page: Open) -> None:
    page = open_page(deployment.url, "requests")
    page.locator(".requests tbody tr").first.wait_for()
    page.get_by_role("searchbox").fill("no such request")
    page.get_by_text("No request matches.").wait_for()
    page.get_by_role("searchbox").fill("decode-long")
    page.locator(".requests tbody tr").first.wait_for()
    page.get_by_role("searchbox").fill("")
    page.get_by_role("button", name="Slow").click()
    page.locator(".requests td.slow").first.wait_for()
    assert page.locator(".requests tbody tr:not(:has(.slow))").count() == 0


def test_the_latency_page_has_plots_by_pool_against_the_targets(deployment: FakeThread, open_page: Open) -> None:
    page = open_page(deployment.url, "latency")
    plot = page.locator(".plot").filter(has_text="First token")
    plot.get_by_text("target 400 ms").wait_for()
    assert plot.locator("polyline.line").count() >= 3
    row = page.get_by_role("row").filter(has_text="decode fast")
    row.locator(".chip").first.wait_for()
    page.get_by_role("button", name="decode fast").click()
    row.wait_for(state="detached")


def test_keys_switch_pages_and_the_theme_is_kept(deployment: FakeThread, open_page: Open) -> None:
    page = open_page(deployment.url, "topology")
    page.keyboard.press("3")
    page.wait_for_selector("#page-latency:not([hidden])")
    page.get_by_role("button", name="Switch between light and dark").click()
    theme = page.evaluate("document.documentElement.dataset.theme")
    page.reload()
    page.wait_for_selector("#live[data-state=live]")
    assert page.evaluate("document.documentElement.dataset.theme") == theme


@pytest.mark.parametrize("path", ["topology", "requests", "latency", "chat"])
def test_no_page_is_wider_than_a_phone(deployment: FakeThread, open_page: Open, path: str) -> None:
    page = open_page(deployment.url, path, viewport={"width": 390, "height": 800})
    page.wait_for_selector(f"#page-{path}:not([hidden])")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.get_by_role("link", name="Chat").is_visible()
