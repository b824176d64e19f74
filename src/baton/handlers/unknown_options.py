"""Options of a request that no engine applies. They are refused by name: nothing is dropped in silence."""

from collections.abc import Iterator, Mapping

from baton.protocol.requests import GenerateRequest

# Keys of the frontend's request that concern the frontend and the router alone.
FRONTEND_KEYS = frozenset(
    {
        "agent_context",
        "image_cache_scope",
        "jail_seed",
        "kv_hint",
        "mdc_sum",
        "migration_link",
        "migration_state",
        "mm_routing_info",
        "request_timestamp_ms",
        "router",
        "router_config_override",
        "staged_kv_cleanup",
        "tracker",
    }
)
_REASONS = {
    "prompt_embeds": "this engine computes the embeddings of a prompt itself",
    "mm_processor_kwargs": "the media processor takes no options with a request",
    "media_io_kwargs": "the media loader takes no options with a request",
    "multi_modal_uuids": "media are identified by their content",
    "max_tokens": "it belongs into stop_conditions",
    "min_tokens": "it belongs into stop_conditions",
    "temperature": "it belongs into sampling_options",
}
_UNKNOWN = "unknown option"


def unknown_options(request: GenerateRequest) -> Iterator[str]:
    """Yield a message for each option in `request` that nothing applies."""
    for key, value in request.extra.items():
        if key not in FRONTEND_KEYS and not _is_empty(value):
            yield f"{key}: {_REASONS.get(key, _UNKNOWN)}"
    guided, diffusion = request.sampling.guided_decoding, request.diffusion
    sections = {
        "stop_conditions": request.stop.extra,
        "sampling_options": request.sampling.extra,
        "output_options": request.output.extra,
        "guided_decoding": guided.extra if guided is not None else {},
        "diffusion": diffusion.extra if diffusion is not None else {},
    }
    for section, extra in sections.items():
        yield from (f"{section}.{key}: {_UNKNOWN}" for key, value in extra.items() if value is not None)
    yield from _unknown_sampling((request.extra_args or {}).get("sampling_options"))


def _is_empty(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


def _unknown_sampling(options: object) -> Iterator[str]:
    """The frontend sends options that its own contract has no field for in `extra_args`."""
    if not isinstance(options, Mapping):
        return
    for key, value in options.items():
        has_no_effect = value is None or (key == "detokenize" and value is True)
        if not has_no_effect:
            yield f"{key}: no engine applies it"
