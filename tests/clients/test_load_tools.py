"""The recipes for load tools in docs/cli.md, as they stand there, against aggregated and disaggregated serving."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.engines.echo.engine import MODEL_DIR
from tests.clients.conftest import QUIET, REMOVED
from tests.clients.endpoint import ENVIRONMENT
from tests.e2e.harness import Serve

pytestmark = [pytest.mark.e2e, pytest.mark.clients, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
REQUESTS = 40
LAYOUTS = {"aggregated": {"workers": 2}, "disaggregated": {"prefill": 1, "decode": 1}}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest, start_shared: Callable[..., Serve]) -> Iterator[tuple[str, Serve]]:
    """A server of each layout."""
    serve = start_shared(Serve, **LAYOUTS[request.param])
    yield request.param, serve
    serve.stop()


def recipe(tool: str) -> str:
    """Return the command of the page that runs `tool`, without the one that installs it."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    block = next(block for block in blocks if f"{tool}/bin/{tool} " in block)
    return block[block.index(f"{tool}/bin/{tool} ") :].replace("\\\n", " ")


def run(tool: str, serve: Serve, directory: Path) -> None:
    """Run the recipe with the address, model and tokenizer of `serve`."""
    command = recipe(tool)
    for before, after in {
        f"{tool}/bin/": f"{ENVIRONMENT / tool / 'bin'}/",
        "http://127.0.0.1:8000": serve.url,
        "~/.cache/baton/models/smollm2-0.1.2": str(MODEL_DIR),
        "$HOME/.cache/baton/models/smollm2-0.1.2": str(MODEL_DIR),
        "smollm2": "echo",
    }.items():
        command = command.replace(before, after)
    assert (ENVIRONMENT / tool).exists(), "run scripts/clients/install.sh, or `make test-clients`"
    # Not offline: aiperf would look for the tokenizer in the cache of the hub then, and not in its directory.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith((*REMOVED, "HF_", "TRANSF"))}
    quiet = {name: value for name, value in QUIET.items() if not name.startswith("HF_")}
    settings = {**inherited, **quiet, "HF_HOME": str(directory), "HOME": str(directory)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=directory, env=settings, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def served(layout: tuple[str, Serve]) -> float:
    """Return how many requests the workers that answer have completed."""
    name, serve = layout
    roles = {"aggregated": [(0, "aggregated"), (1, "aggregated")], "disaggregated": [(1, "decode")]}[name]
    return sum(serve.ended("completed", worker, role) for worker, role in roles)


def test_aiperf(layout: tuple[str, Serve], tmp_path: Path) -> None:
    before = served(layout)
    run("aiperf", layout[1], tmp_path)
    (file,) = (tmp_path / "aiperf-results").rglob("profile_export_aiperf.json")
    results = json.loads(file.read_text())
    assert results["request_count"]["avg"] == REQUESTS
    assert not (results.get("error_request_count") or {}).get("avg")
    assert results["time_to_first_token"]["p99"] > 0
    assert served(layout) - before >= REQUESTS


def test_guidellm(layout: tuple[str, Serve], tmp_path: Path) -> None:
    before = served(layout)
    run("guidellm", layout[1], tmp_path)
    (benchmark,) = json.loads((tmp_path / "guidellm.json").read_text())["benchmarks"]
    state = benchmark["scheduler_state"]  # its metrics may leave out requests at the edges of the measured time
    assert (state["successful_requests"], state["errored_requests"]) == (REQUESTS, 0)
    assert benchmark["metrics"]["request_totals"]["errored"] == 0
    assert served(layout) - before >= REQUESTS
