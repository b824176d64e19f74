"""Models in discovery: what frontends learn of a worker, and what it must refuse although a frontend sends it."""

import functools
import operator
from collections.abc import Callable

from dynamo import _core

from baton.ports.runtime import ModelCard, Wire
from baton.runtimes.dynamo.routing import ROUTER_MODES, refuse_missing_taints
from baton.runtimes.dynamo.tool_calls import mark_requests_with_tools, refuse_tools

_SURFACES = {
    "chat": _core.ModelType.Chat,
    "completions": _core.ModelType.Completions,
    "embeddings": _core.ModelType.Embedding,
    "prefill": _core.ModelType.Prefill,
}
_WORKER_TYPES = {
    "aggregated": _core.WorkerType.Aggregated,
    "prefill": _core.WorkerType.Prefill,
    "decode": _core.WorkerType.Decode,
    "encode": _core.WorkerType.Encode,
}
_INPUTS = {"tokens": _core.ModelInput.Tokens, "text": _core.ModelInput.Text}


async def register(raw: _core.Endpoint, card: ModelCard, adapter: str | None = None) -> None:
    """Register the model of `card` at an endpoint, or an adapter of it."""
    await _core.register_model(
        _INPUTS[card.model_input],
        _model_type(card),
        raw,
        card.directory,
        card.name if adapter is None else None,
        worker_type=_WORKER_TYPES[card.worker_type],
        kv_cache_block_size=card.block_size,
        router_config=_core.RouterConfig(ROUTER_MODES[card.router]) if card.router is not None else None,
        runtime_config=_runtime_config(card),
        custom_template_path=card.chat.template if card.model_input == "tokens" else None,
        needs=[[_WORKER_TYPES[name] for name in group] for group in card.needs] or None,
        skip_model_assets=card.model_input == "text",
        lora_name=adapter,
        base_model_path=None if adapter is None else card.directory,
    )


def request_checks(card: ModelCard) -> list[Callable[[Wire], None]]:
    """Return what refuses the requests that this worker must not serve, although a frontend sends them."""
    missing_taints = functools.partial(refuse_missing_taints, taints=_taints(card))
    return [missing_taints, refuse_tools] if _lacks_tool_calls(card) else [missing_taints]


def _model_type(card: ModelCard) -> _core.ModelType:
    surfaces = [_SURFACES[surface] for surface in sorted(card.surfaces)]
    return functools.reduce(operator.or_, surfaces) if surfaces else _core.ModelType.Empty


def _taints(card: ModelCard) -> frozenset[str]:
    """Return all names that requests can require of the worker; the runtime adds one for its place."""
    place = card.locality
    return card.taints if place is None else card.taints | {f"dynamo.topology/{place.domain}={place.value}"}


def _lacks_tool_calls(card: ModelCard) -> bool:
    """Whether the frontend renders prompts for the model, but cannot parse its tool calls."""
    return card.model_input == "tokens" and card.chat.tool_call_parser is None


def _runtime_config(card: ModelCard) -> _core.ModelRuntimeConfig:
    config = _core.ModelRuntimeConfig()
    config.context_length = card.context_length
    config.total_kv_blocks = card.total_blocks
    config.max_num_seqs = card.max_running
    if card.max_batch_tokens is not None:
        config.max_num_batched_tokens = card.max_batch_tokens
    config.data_parallel_size = card.dp_size
    config.kv_event_publishing_enabled = card.kv_events
    config.enable_local_indexer = card.kv_events
    config.tool_call_parser = card.chat.tool_call_parser
    config.reasoning_parser = card.chat.reasoning_parser
    if _lacks_tool_calls(card):
        mark_requests_with_tools(config)
    config.taints = set(card.taints)
    if card.locality is not None:
        config.topology_domains = {card.locality.domain: card.locality.value}
        config.kv_transfer_domain = card.locality.domain
        config.kv_transfer_enforcement = card.locality.enforcement
    if card.handoff_host is not None and card.handoff_port is not None:
        config.set_disaggregated_endpoint(card.handoff_host, card.handoff_port)
    if card.worker_type == "encode" or any("encode" in group for group in card.needs):
        # The frontend passes an encode worker's result on only if both workers set this.
        config.set_engine_specific("encoder_result_handoff", "true")
    return config
