"""axe-core finds nothing on any page, light or dark."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.view.fake_deployment import disaggregated
from tests.view.fake_thread import FakeThread

pytestmark = [pytest.mark.view, pytest.mark.timeout(300)]

AXE = Path(os.environ.get("AXE_JS", "node_modules/axe-core/axe.min.js"))


@pytest.fixture(scope="module")
def deployment() -> Iterator[FakeThread]:
    fake = disaggregated(1, 2, pools=("fast",))
    fake.history(120, 0.5)
    with FakeThread(fake).running() as running:
        yield running


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("path", ["topology", "requests", "latency", "chat"])
def test_a_page_has_no_violation(deployment: FakeThread, open_page: Callable[..., Any], path: str, theme: str) -> None:
    if not AXE.exists():
        pytest.skip(f"{AXE} is missing; make test-view installs it with npm")
    # The page allows scripts of its own server only; the test adds one. Nothing that fades in has its colours yet.
    page = open_page(deployment.url, path, color_scheme=theme, reduced_motion="reduce", bypass_csp=True)
    if path == "requests":
        page.locator(".requests tbody tr .open").first.click()
        page.locator(".waterfall").wait_for()
    if path == "topology":
        page.get_by_role("button", name="decode-fast-0").click()
        page.get_by_text("Last errors").wait_for()
    page.add_script_tag(content=AXE.read_text())
    found = page.evaluate("axe.run({resultTypes: ['violations']})")
    problems = [(each["id"], [node["target"] for node in each["nodes"]][:3]) for each in found["violations"]]
    assert not problems, json.dumps(problems, indent=1)
