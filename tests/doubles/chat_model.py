"""A model directory of the Qwen3 family for the echo engine: tags of tool calls and reasoning are single tokens."""

import json
import shutil
from pathlib import Path

from baton.engines.echo.engine import MODEL_DIR

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}"
    "Answer with <tool_call>JSON</tool_call>, after <think>reasoning</think>.\n{% endif %}"
    "{% for message in messages %}{{ message.content }}\n{% endfor %}"
)


def make_chat_model(directory: Path) -> Path:
    """Write the model to `directory`, which must not exist, and return it."""
    shutil.copytree(MODEL_DIR, directory)
    _change(directory / "config.json", model_type="qwen3", vocab_size=258 + len(TAGS))
    _change(directory / "tokenizer_config.json", chat_template=TEMPLATE)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    added = [{"id": 258 + number, "content": tag, **kind} for number, tag in enumerate(TAGS)]
    _change(directory / "tokenizer.json", added_tokens=tokenizer["added_tokens"] + added)
    return directory


def _change(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
