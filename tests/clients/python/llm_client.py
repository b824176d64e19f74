"""`llm`, the command-line tool, with a model that its user has registered in extra-openai-models.yaml."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from program import GREETING, UNKNOWN_MODEL, WRONG_KEY, Server, run


def ask(server: Server, *arguments: str, model: str | None = None, key: str | None = None) -> str:
    """Run `llm` with a configuration of its own; return what it prints. Raises RuntimeError with its complaint."""
    with tempfile.TemporaryDirectory() as directory:
        models = [
            {"model_id": name, "model_name": name, "api_base": server.base_url, "api_key_name": "baton"}
            for name in (server.model, UNKNOWN_MODEL)
        ]
        # JSON is YAML.
        Path(directory, "extra-openai-models.yaml").write_text(json.dumps(models))
        Path(directory, "keys.json").write_text(json.dumps({"baton": key or server.key}))
        done = subprocess.run(
            [sys.executable, "-m", "llm", "prompt", "--no-log", "-m", model or server.model, *arguments, GREETING],
            env={**os.environ, "LLM_USER_PATH": directory},
            capture_output=True,
            text=True,
            timeout=60,
        )
    if done.returncode:
        raise RuntimeError(done.stderr or done.stdout)
    return done.stdout.removesuffix("\n")


def chat(server: Server) -> Any:
    return ask(server, "--no-stream")


def stream(server: Server) -> Any:
    return [ask(server)]


def unknown_model(server: Server) -> Any:
    return ask(server, model=UNKNOWN_MODEL)


def bad_parameter(server: Server) -> Any:
    return ask(server, "-o", "logit_bias", json.dumps({"1": 150}))


def wrong_key(server: Server) -> Any:
    return ask(server, key=WRONG_KEY)


if __name__ == "__main__":
    run(chat, stream, unknown_model, bad_parameter, wrong_key)
