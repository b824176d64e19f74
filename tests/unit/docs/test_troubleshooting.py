"""The messages on the page for troubleshooting are those of the program, and its metrics exist."""

import re
from functools import cache

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
WORDS_IN_A_ROW = 3
TABLES = ("It does not start", "It fails under load", "Answers are wrong or slow", "Commands and metrics")


def messages(section: str) -> list[str]:
    """Return the messages in the first column of a table: code of several words, and texts in quotation marks."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    found = [span for cell in cells for span in re.findall(r"`([^`]+)`", cell) + re.findall(r'"([^"]+)"', cell)]
    return [span for span in found if len(span.split()) > 2 and not span.startswith("baton_")]


@cache
def source() -> str:
    """Return the text of all modules in one line, with strings that continue each other joined."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "src" / "baton").rglob("*.py")))
    joined = re.sub(r'"\s*\n\s*f?"', "", text)
    return " ".join(re.sub(r"\{[^{}]*\}", " ", joined).replace("%s", " ").replace("%g", " ").split())


@pytest.mark.parametrize("section", TABLES)
def test_every_message_is_one_of_the_program(section: str) -> None:
    assert messages(section)
    for message in messages(section):
        words = message.replace("...", " ").replace("`", " ").split()
        length = min(WORDS_IN_A_ROW, len(words) - 2)
        runs = [" ".join(words[at : at + length]) for at in range(len(words) - length + 1)]
        assert any(run in source() for run in runs), f"no message of the program has {message!r}"
