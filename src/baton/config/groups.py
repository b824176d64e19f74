"""The groups in which help shows the settings, and the common ones that `--help` shows without the others.

A test checks that every setting is in one group. A section of settings is named with a dot and nothing after it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from baton.config.load import Option


class Group(NamedTuple):
    """A title, and the keys of its settings in the order in which help shows them."""

    title: str
    keys: tuple[str, ...]


GROUPS = (
    Group(
        "Model and engine",
        (
            "model",
            "name",
            "engine",
            "engine_args",
            "context_length",
            "model_input",
            "chat_template",
            "tool_call_parser",
            "reasoning_parser",
            "cache_dir",
        ),
    ),
    Group(
        "Workers",
        (
            "workers",
            "prefill",
            "decode",
            "encode",
            "process",
            "role",
            "topology",
            "taints",
            "max_in_flight",
            "language_namespace",
        ),
    ),
    Group("Endpoint", ("host", "port", "body_limit_mb", "cors_origins")),
    Group(
        "Access and TLS",
        (
            "api_key_file",
            "api_key",
            "key_requests_per_minute",
            "key_max_concurrency",
            "tls_certificate",
            "tls_key",
        ),
    ),
    Group(
        "Routing",
        (
            "router",
            "router_prefill",
            "router_decode",
            "router_policy",
            "session_affinity",
            "session_ttl_s",
            "busy_threshold",
            "migrations",
            "default_ttft_ms",
            "default_itl_ms",
            "pool_endpoint",
        ),
    ),
    Group(
        "Time limits and health",
        (
            "request_timeout_s",
            "start_timeout_s",
            "drain_timeout_s",
            "abort_timeout_s",
            "stall_timeout_s",
            "canary_interval_s",
            "canary_timeout_s",
            "reader_stall_timeout_s",
            "flush_interval_ms",
        ),
    ),
    Group(
        "System server and control",
        (
            "system_host",
            "system_port",
            "control",
            "control_token_file",
            "control_token",
            "command_timeout_s",
        ),
    ),
    Group("Web view", ("view", "view_host", "view_port", "view_token")),
    Group(
        "Logs, timelines and profiles",
        ("log_level", "log_format", "log_dir", "log_max_bytes", "timeline_requests", "profile_dir"),
    ),
    Group("Discovery and transports", ("namespace", "runtime.")),
    Group("KV transfer", ("kv.",)),
    Group("Media", ("media.",)),
    Group("Engine torch", ("torch.",)),
    Group("Engine sglang", ("sglang.",)),
    Group("Experts", ("experts.",)),
    Group("Engine trtllm", ("trtllm.",)),
    Group("Engine echo", ("echo.",)),
)

COMMON = frozenset(
    (
        "model",
        "name",
        "engine",
        "context_length",
        "workers",
        "prefill",
        "decode",
        "encode",
        "role",
        "topology",
        "host",
        "port",
        "api_key_file",
        "router",
        "torch.device",
        "torch.kv_memory_fraction",
        "system_port",
        "log_level",
        "log_dir",
        "runtime.discovery",
        "runtime.etcd",
    )
)


def grouped(options: Sequence[Option]) -> list[tuple[str, list[Option]]]:
    """Return `options` by group, without empty groups."""
    sections = ((group.title, [each for key in group.keys for each in _matching(key, options)]) for group in GROUPS)
    return [(title, found) for title, found in sections if found]


def _matching(key: str, options: Sequence[Option]) -> list[Option]:
    if key.endswith("."):
        return [option for option in options if option.key.startswith(key)]
    return [option for option in options if option.key == key]
