"""Scripted answers of the echo engine: texts in prompts, and what to generate for them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from baton.errors import ConfigError
from baton.models.tokenizer import HubTokenizer


class Script:
    """Answers by a text that the prompt contains."""

    def __init__(self, answers: Mapping[str, str], tokenizer: HubTokenizer) -> None:
        self._tokenizer = tokenizer
        self._answers = {text: tuple(tokenizer.encode(answer)) for text, answer in answers.items()}

    def answer(self, prompt: Sequence[int]) -> tuple[int, ...] | None:
        """Return the tokens to generate after `prompt`: those of the first text that it contains, None without one."""
        decoded = self._tokenizer.decode(prompt)
        return next((answer for text, answer in self._answers.items() if text in decoded), None)


def read_script(file: Path, model_dir: Path) -> Script:
    """Return the script in `file`. Raises ConfigError."""
    try:
        answers = yaml.safe_load(file.expanduser().read_text())
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read --echo-script {file}: {error}") from None
    if not isinstance(answers, dict) or not all(
        isinstance(text, str) and text for text in (*answers, *answers.values())
    ):
        raise ConfigError(f"--echo-script {file} must map texts to answers, which are not empty")
    return Script(answers, HubTokenizer(model_dir))
