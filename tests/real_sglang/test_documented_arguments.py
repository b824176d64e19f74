"""Arguments of SGLang in the documentation are those of the installed version."""

import re
from pathlib import Path

from baton.config.engines import SglangOptions
from baton.engines.sglang.engine_info import capabilities_of
from baton.engines.sglang.launch_mode import LaunchMode
from baton.engines.sglang.server_args import Arguments, help_text
from tests.docs.pages import commands, inline_commands, pages

SGLANG_PAGE = Path(__file__).parents[2] / "docs/engines/sglang.md"


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


def test_the_documented_reasoning_parsers_are_those_with_thinking_budgets(tmp_path: Path) -> None:
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    def takes_budgets(parser: str) -> bool:
        values = {"reasoning_parser": parser, "enable_strict_thinking": True, "dp_size": 1}
        arguments = Arguments(given=frozenset(), values=values)
        return capabilities_of(LaunchMode(), SglangOptions(), arguments, tmp_path).max_thinking_tokens

    listed = SGLANG_PAGE.read_text().partition("excludes tokens from reasoning:")[2].partition(". ")[0]
    known = {*ReasoningParser.DetectorMap, "auto"}
    assert set(re.findall(r"`(.+?)`", listed)) == {parser for parser in known if takes_budgets(parser)}
