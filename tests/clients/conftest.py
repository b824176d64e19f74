"""Real clients against one `baton serve`: `make test-clients`, which installs them (scripts/clients/install.sh)."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.clients.endpoint import ENVIRONMENT, KEY, MODEL, SCRIPT
from tests.doubles.chat_model import make_chat_model
from tests.e2e.conftest import pytest_runtest_makereport, start, start_shared  # noqa: F401
from tests.e2e.harness import Serve

PROGRAMS = Path(__file__).parent
CLIENT_S = 240.0
# No client reads the settings of the machine's user, or asks anybody but the server.
REMOVED = ("OPENAI_", "ANTHROPIC_", "BATON_", "DYN_", "LANG", "PYTHON")
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "NO_PROXY": "*"}

Results = Callable[[str, str], Any]


@pytest.fixture(scope="module")
def endpoint(start_shared: Callable[..., Serve], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:  # noqa: F811
    """A server with an API key, one event per token, and answers as a model of the Qwen family would write them."""
    directory = tmp_path_factory.mktemp("chat")
    make_chat_model(directory / MODEL)
    (directory / "script.yaml").write_text(json.dumps(SCRIPT))
    serve = start_shared(
        Serve,
        *("--model", str(directory / MODEL), "--echo-script", str(directory / "script.yaml"), "--api-key", KEY),
        settings={"BATON_FLUSH_INTERVAL_MS": "0", "BATON_ECHO_BURST": "1"},
    )
    yield serve
    serve.stop()


@pytest.fixture(scope="module")
def smollm2(start_shared: Callable[..., Serve]) -> Iterator[Serve]:  # noqa: F811
    """A server with a real model, which generates by the schemas that clients send."""
    flags = ("--model", "smollm2", "--tool-call-parser", "hermes", "--api-key", KEY)
    serve = start_shared(Serve, *flags, engine="torch")
    yield serve
    serve.stop()


def run_client(program: Path, environment: str, server: Serve, model: str) -> dict[str, Any]:
    """Run a client's program against `server`; return what its user sees, by part."""
    interpreter = ENVIRONMENT / environment / "bin" / ("node" if program.suffix == ".mjs" else "python")
    if not interpreter.exists():
        pytest.fail(f"{interpreter} does not exist: run scripts/clients/install.sh, or `make test-clients`")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(REMOVED)}
    done = subprocess.run(
        [interpreter, program, json.dumps({"url": server.url, "key": KEY, "model": model})],
        env={**inherited, **QUIET},
        capture_output=True,
        text=True,
        timeout=CLIENT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def seen(endpoint: Serve, request: pytest.FixtureRequest) -> Results:
    """Return what the user of a client sees of a part of its program, which runs once."""

    @cache
    def results(client: str) -> dict[str, Any]:
        file, environment, model = CLIENTS[client]
        server = endpoint if model == MODEL else request.getfixturevalue(model)
        return run_client(PROGRAMS / file, environment, server, model)

    return lambda client, part: results(client)[part]


# By name: the program, the environment that it runs in, and the model that it asks.
CLIENTS = {
    "openai-python": ("python/openai_client.py", "openai-3", MODEL),
    "openai-node": ("node/openai_client.mjs", "openai-3", MODEL),
    "vercel": ("node/vercel_client.mjs", "openai-3", MODEL),
    "langchain": ("python/langchain_client.py", "openai-3", MODEL),
    "llama-index": ("python/llama_index_client.py", "openai-2", MODEL),
    "litellm": ("python/litellm_client.py", "openai-2", MODEL),
    "pydantic-ai": ("python/pydantic_ai_client.py", "openai-3", MODEL),
    "llm": ("python/llm_client.py", "openai-3", MODEL),
    "instructor": ("python/instructor_client.py", "openai-2", "smollm2"),
    "anthropic-python": ("python/anthropic_client.py", "openai-3", MODEL),
    "anthropic-node": ("node/anthropic_client.mjs", "openai-3", MODEL),
}
