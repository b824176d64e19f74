"""Parsers are chosen by the model's type and chat template, and never guessed."""

from typing import get_args

import pytest
from dynamo import _core

from baton.config.parsers import ReasoningParser, ToolCallParser
from baton.models.families import NO_PARSER, REASONING, TOOL_CALLS, find_parser

TOOLS_IN_TAGS = "{{ tools }}<tool_call>{{ call }}</tool_call>"


@pytest.mark.parametrize(
    ("model_type", "template", "tool_calls", "reasoning"),
    [
        ("qwen2", TOOLS_IN_TAGS, "hermes", NO_PARSER),
        ("qwen3", TOOLS_IN_TAGS + "<think>", "hermes", "qwen3"),
        ("qwen3_moe", TOOLS_IN_TAGS + "<function=f>", "qwen3_coder", NO_PARSER),
        ("llama", "Environment: ipython", "llama3_json", NO_PARSER),
        ("llama", TOOLS_IN_TAGS, "hermes", NO_PARSER),
        ("llama", "{{ messages }}", NO_PARSER, NO_PARSER),
        ("mistral", "[TOOL_CALLS]", "mistral", NO_PARSER),
        ("gpt_oss", "", "harmony", "gpt_oss"),
        ("deepseek_v3", "<\uff5cAssistant\uff5c><think>", NO_PARSER, "deepseek_r1"),
        ("unheard_of", TOOLS_IN_TAGS + "<think>", NO_PARSER, NO_PARSER),
    ],
)
def test_parsers_by_family(model_type: str, template: str, tool_calls: str, reasoning: str) -> None:
    assert find_parser(TOOL_CALLS, model_type, template) == tool_calls
    assert find_parser(REASONING, model_type, template) == reasoning


def test_settings_and_table_name_the_parsers_of_the_runtime() -> None:
    tool_calls, reasoning = set(_core.get_tool_parser_names()), set(_core.get_reasoning_parser_names())
    assert set(get_args(ToolCallParser)) == tool_calls | {"auto", NO_PARSER}
    assert set(get_args(ReasoningParser)) == reasoning | {"auto", NO_PARSER}
    assert {each.parser for each in TOOL_CALLS} <= tool_calls
    assert {each.parser for each in REASONING} <= reasoning
