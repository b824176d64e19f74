"""Arguments of SGLang in the documentation are those of the installed version."""

import re

from baton.engines.sglang.server_args import help_text
from tests.docs.pages import commands, inline_commands, pages


def documented() -> dict[str, str]:
    """Return the arguments that follow `--` in commands with this engine, and where they are."""
    found = {}
    for page in pages():
        for command in commands(page) + inline_commands(page):
            ours, separator, theirs = command.text.partition(" -- ")
            if separator and "sglang" in ours:
                found.update(dict.fromkeys(re.findall(r"--[\w-]+", theirs), f"{page}:{command.line}"))
    return found


def test_every_documented_argument_is_one_of_sglang() -> None:
    known = set(re.findall(r"--[\w-]+", help_text()))
    assert {"--tp-size", "--mem-fraction-static"} <= documented().keys()
    assert {flag: place for flag, place in documented().items() if flag not in known} == {}
