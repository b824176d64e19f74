"""Model families: which formats of tool calls and reasoning a model writes, by its configuration and chat template."""

from collections.abc import Iterable
from typing import NamedTuple

NO_PARSER = "none"

_QWEN2 = ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl")
_QWEN3 = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "sdar", "sdar_moe")
_MISTRAL = ("mistral", "mistral3", "mixtral")


class Format(NamedTuple):
    """A format: the `model_type`s that write it, a text that their chat template contains, and its parser."""

    model_types: tuple[str, ...]
    marker: str
    parser: str


# The first match is used. Models of one type differ, so a marker is required where fine-tunes use other formats.
TOOL_CALLS = (
    Format((*_QWEN2, *_QWEN3), "<function=", "qwen3_coder"),
    Format((*_QWEN2, *_QWEN3, *_MISTRAL, "llama"), "<tool_call>", "hermes"),
    Format(("llama", "mllama"), "Environment: ipython", "llama3_json"),
    Format(("llama4",), "", "pythonic"),
    Format(_MISTRAL, "[TOOL_CALLS]", "mistral"),
    Format(("phi3",), "<|tool|>", "phi4"),
    Format(("gpt_oss",), "", "harmony"),
    Format(("deepseek_v3",), "not thinking", "deepseek_v3_1"),
    Format(("deepseek_v3",), "<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek_v3"),
    Format(("deepseek_v32",), "", "deepseek_v3_2"),
    Format(("kimi_k2",), "", "kimi_k2"),
    Format(("minimax_m2",), "", "minimax_m2"),
    Format(("jamba",), "<tool_calls>", "jamba"),
)
REASONING = (
    Format((*_QWEN2, "llama", "deepseek_v3"), "<\uff5cAssistant\uff5c><think>", "deepseek_r1"),
    Format((*_QWEN2, *_QWEN3), "<think>", "qwen3"),
    Format(_MISTRAL, "[THINK]", "mistral"),
    Format(("gpt_oss",), "", "gpt_oss"),
    Format(("deepseek_v3",), "not thinking", "deepseek_v3_1"),
    Format(("deepseek_v32",), "", "deepseek_v3_2"),
    Format(("kimi_k2",), "<think>", "kimi_k2"),
    Format(("minimax_m2",), "", "minimax_m2"),
    Format(("glm4_moe",), "<think>", "glm45"),
    Format(("granite",), "Here is my thought process", "granite"),
)


def find_parser(formats: Iterable[Format], model_type: str, template: str) -> str:
    """Return the parser for models of `model_type` with this chat template; `NO_PARSER` if their format is unknown."""
    matches = (each.parser for each in formats if model_type in each.model_types and each.marker in template)
    return next(matches, NO_PARSER)
