"""The runtime's metrics with Prometheus' names and base units: a few of them have neither."""

import re
from typing import Literal, NamedTuple


class Renamed(NamedTuple):
    """The name, type and factor of a metric that the runtime calls something else."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    factor: float = 1.0


_OVERHEADS = ("block_hashing", "indexer_find_matches", "scheduling", "seq_hashing", "shared_cache_query", "total")

RENAMED = {
    "dynamo_component_kv_cache_event_warnings": Renamed("dynamo_component_kv_cache_event_warnings_total", "counter"),
    "dynamo_component_kv_cache_events_applied": Renamed("dynamo_component_kv_cache_events_applied_total", "counter"),
    "dynamo_frontend_detokenize_token_count": Renamed("dynamo_frontend_detokenized_tokens_total", "counter"),
    "dynamo_frontend_detokenize_total_us": Renamed("dynamo_frontend_detokenize_seconds_total", "counter", 1e-6),
    "dynamo_frontend_lora_churn_loads_total": Renamed("dynamo_frontend_lora_churn_loads", "gauge"),
    "dynamo_frontend_lora_churn_unloads_total": Renamed("dynamo_frontend_lora_churn_unloads", "gauge"),
    "dynamo_frontend_lora_overflow_count": Renamed("dynamo_frontend_lora_overflow_replicas", "gauge"),
    "dynamo_frontend_tokenizer_latency_ms": Renamed("dynamo_frontend_tokenizer_latency_seconds", "histogram", 1e-3),
    "dynamo_tokio_worker_busy_ratio": Renamed("dynamo_tokio_worker_busy_ratio", "gauge", 1e-3),
    "dynamo_tokio_worker_mean_poll_time_ns": Renamed("dynamo_tokio_worker_mean_poll_time_seconds", "gauge", 1e-9),
} | {
    f"dynamo_router_overhead_{part}_ms": Renamed(f"dynamo_router_overhead_{part}_seconds", "histogram", 1e-3)
    for part in _OVERHEADS
}
"""By the runtime's name."""

_DECLARATION = re.compile(r"# (HELP|TYPE) (\S+) (.*)")
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)")
_BOUND = re.compile(r'le="([^"]+)"')
_SUFFIXES = ("_bucket", "_sum", "_count")
_UNIT = re.compile(r" ?\(?in milliseconds\)?| \((?:micro|nano)seconds\)| as integer mill ratio; >950 = saturated")


def with_base_units(text: str) -> str:
    """Return the runtime's Prometheus text with seconds and ratios, and with names that say so."""
    return "".join(f"{_converted(line)}\n" for line in text.splitlines())


def _converted(line: str) -> str:
    if line.startswith("#"):
        return _declaration(line)
    sample = _SAMPLE.match(line)
    if sample is None:
        return line
    family, suffix = _family(sample[1])
    renamed = RENAMED.get(family)
    if renamed is None:
        return line
    labels = sample[2] or ""
    if suffix == "_bucket":
        labels = _BOUND.sub(lambda bound: f'le="{_scaled(bound[1], renamed.factor)}"', labels)
    is_count = suffix in ("_bucket", "_count")
    return f"{renamed.name}{suffix}{labels} {sample[3] if is_count else _scaled(sample[3], renamed.factor)}"


def _declaration(line: str) -> str:
    found = _DECLARATION.match(line)
    renamed = RENAMED.get(found[2]) if found is not None else None
    if found is None or renamed is None:
        return line
    about = renamed.kind if found[1] == "TYPE" else _UNIT.sub("", found[3])
    return f"# {found[1]} {renamed.name} {about}"


def _family(name: str) -> tuple[str, str]:
    """Return the name of the family of a sample, and what the sample's name adds to it."""
    if name in RENAMED:
        return name, ""
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return name, ""


def _scaled(number: str, factor: float) -> str:
    value = float(number) * factor
    return number if factor == 1.0 or value in (float("inf"), float("-inf")) else f"{value:.12g}"
