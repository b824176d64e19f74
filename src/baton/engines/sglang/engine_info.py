"""What an engine can do, said by its arguments before it starts, and what it turned out to be once it runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from baton.config.engines import SglangOptions
from baton.engines.sglang.sglang_types import Engine, Snapshot
from baton.engines.sglang.launch_mode import Part
from baton.engines.sglang.tcp_ports import meeting_host
from baton.engines.sglang.server_args import Arguments
from baton.ports.engine import Capabilities, EngineInfo, HandoffStyle

MOST_LOGPROBS = 128  # as many as fit what prefill tells decode of the first token
MOST_CHOICES = 128
GUIDES = frozenset({"json", "regex", "choice", "grammar", "structural_tag"})
TAGS = frozenset({"kv_cache", "weights", "cuda_graph"})
SPARE_INPUT = 5  # SGLang keeps so many tokens of a request's room from its prompt
SPARE = 1  # and one from its answer


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine has turned out to be."""

    page: int
    total_tokens: int
    max_running: int
    context: int
    longest_prompt: int
    vocabulary: int
    eos_token_ids: tuple[int, ...]
    hidden_size: int
    values: Mapping[str, Any]


def capabilities_of(part: Part, options: SglangOptions, arguments: Arguments, model_dir: Path) -> Capabilities:
    """Return what an engine with these arguments can do."""
    values = arguments.values
    if part == "embed":
        return Capabilities(generate=False, embeddings=True, dp_size=arguments.dp_size)
    whole, diffusion = part == "whole", bool(values.get("dllm_algorithm"))
    guides = options.guided and not diffusion and values.get("grammar_backend") != "none"
    return Capabilities(
        diffusion=diffusion,
        modalities=_modalities(model_dir, values),
        handoff=HandoffStyle.NONE if whole else HandoffStyle.EARLY,
        needs_kv=part == "decode",
        max_logprobs=None if diffusion else MOST_LOGPROBS,
        prompt_logprobs=whole and not diffusion,
        max_choices=MOST_CHOICES if whole else 1,
        guided=GUIDES if guides else frozenset(),
        logit_bias=not diffusion,
        lora=bool(values.get("enable_lora") or values.get("lora_paths")),
        memory_tags=TAGS if values.get("enable_memory_saver") else frozenset(),
        weight_sources=_weight_sources(values),
        pause_modes=frozenset({"abort", "keep"} | ({"retract"} if whole and not diffusion else set())),
        clear_cache=True,
        profile=True,
        expert_records=values.get("expert_distribution_recorder_mode") is not None,
        dp_size=arguments.dp_size,
    )


def facts_of(engine: Engine, snapshots: list[Snapshot]) -> Facts:
    """Return what a started engine has turned out to be; its schedulers have told their load once."""
    values = engine.server_args.resolved_dict()
    told = engine._scheduler_init_result.scheduler_infos[0]
    manager = engine.tokenizer_manager
    config = manager.model_config if manager is not None else None
    longest_prompt = int(told["max_req_input_len"]) - 1
    return Facts(
        page=int(values["page_size"] or 1),
        total_tokens=int(told["max_total_num_tokens"]),
        max_running=sum(getattr(s, "max_running_requests", 0) for s in snapshots)
        or int(values["max_running_requests"] or 1),
        context=longest_prompt + SPARE_INPUT,
        longest_prompt=longest_prompt,
        vocabulary=config.vocab_size if config is not None else 0,
        eos_token_ids=tuple(sorted(config.hf_eos_token_id or ())) if config is not None else (),
        hidden_size=config.hidden_size if config is not None else 0,
        values=values,
    )


def engine_info(
    facts: Facts, part: Part, options: SglangOptions, arguments: Arguments, model_dir: Path, name: str
) -> EngineInfo:
    """Return what a started engine serves."""
    meets = part == "prefill" and arguments.leader
    return EngineInfo(
        model_name=name,
        model_dir=str(model_dir),
        context_length=facts.context,
        block_size=facts.page,
        total_blocks=max(1, facts.total_tokens // facts.page),
        max_running=facts.max_running,
        eos_token_ids=facts.eos_token_ids,
        embedding_size=facts.hidden_size if part == "embed" else None,
        handoff_host=meeting_host(options.host, arguments.values["dist_init_addr"]) if meets else None,
        handoff_port=int(facts.values["disaggregation_bootstrap_port"]) if meets else None,
        leader=arguments.leader,
        group=arguments.values["dist_init_addr"] if int(arguments.values["nnodes"]) > 1 else None,
    )


def _weight_sources(values: Mapping[str, Any]) -> frozenset[str]:
    sources = {"disk"}
    if int(values["dp_size"]) == 1:
        sources |= {"tensors", "shared_memory", "group"}
        if values.get("device") != "cpu":
            sources.add("ipc")
    return frozenset(sources)


def _modalities(model_dir: Path, values: Mapping[str, Any]) -> frozenset[str]:
    """Return what the model takes, as its configuration says."""
    if values.get("enable_multimodal") is False or values.get("language_model_only"):
        return frozenset({"text"})
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError):
        return frozenset({"text"})
    config |= config.get("thinker_config") or {}
    found = {"text"}
    found |= {"image"} if "vision_config" in config else set()
    found |= {"audio"} if "audio_config" in config else set()
    found |= {"video"} if {"video_token_id", "video_token_index"} & config.keys() else set()
    return frozenset(found)
