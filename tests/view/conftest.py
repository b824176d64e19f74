"""A real browser, and a deployment that it looks at. Debian's package `chromium` has to be installed."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.conftest import pytest_runtest_makereport, start, start_shared

__all__ = ["pytest_runtest_makereport", "start", "start_shared"]

playwright = pytest.importorskip("playwright.sync_api", reason="make test-view installs it")
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
TIMEOUT_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a page of a view. Whatever it logs as an error fails the test, unless it has the words `allowed`."""
    contexts: list[Any] = []
    problems: list[str] = []

    def open_page(url: str, path: str = "", allowed: str | None = None, **options: Any) -> Any:
        def note(message: Any) -> None:
            if message.type == "error" and (allowed is None or allowed not in message.text):
                problems.append(message.text)

        context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
        context.set_default_timeout(TIMEOUT_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", note)
        page.goto(f"{url}#/{path}")
        page.wait_for_selector("#live[data-state=live]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems, problems
