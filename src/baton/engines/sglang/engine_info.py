"""What an engine can do, from its arguments, and what it is once it runs."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from baton.config.engines import SglangOptions
from baton.engines.sglang.experts import records_experts
from baton.engines.sglang.launch_mode import LaunchMode
from baton.engines.sglang.server_args import Arguments
from baton.engines.sglang.sglang_types import Engine, Manager, ModelConfig, Snapshot
from baton.engines.sglang.tcp_ports import bootstrap_host
from baton.engines.sglang.vision_model import MODALITIES, read_vision_model
from baton.models.reasoning import reasoning_end_token
from baton.models.sentence import shorter_sizes
from baton.ports.engine import Capabilities, EngineInfo, HandoffStyle

log = logging.getLogger(__name__)

MAX_LOGPROBS = 128  # the size of the buffer that prefill sends to decode with the first token
MAX_CHOICES = 128
GUIDES = frozenset({"json", "regex", "choice", "grammar", "structural_tag"})
MEMORY_TAGS = frozenset({"kv_cache", "weights", "cuda_graph"})
RESERVED_TOKENS = 5  # of a request's tokens, SGLang does not give these to its prompt


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine reports about itself. Its KV events are of blocks of `block_size` tokens."""

    block_size: int
    total_tokens: int
    max_running: int
    context: int
    max_prompt_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    hidden_size: int
    embedding_dimensions: tuple[int, ...]
    adapters: tuple[str, ...]
    values: Mapping[str, Any]


def capabilities_of(
    mode: LaunchMode, options: SglangOptions, arguments: Arguments, model_dir: Path, from_encoders: bool = False
) -> Capabilities:
    """Return what an engine with these arguments can do. With `from_encoders` it takes what encode workers encode."""
    if mode.embedding:
        return Capabilities(generate=False, embeddings=True, dp_size=arguments.dp_size)
    values, diffusion = arguments.values, bool(arguments.values.get("dllm_algorithm"))
    return Capabilities(
        diffusion=diffusion,
        lora=bool(values.get("enable_lora") or values.get("lora_paths")),
        memory_tags=MEMORY_TAGS if values.get("enable_memory_saver") else frozenset(),
        weight_sources=_weight_sources(values),
        clear_cache=True,
        profile=True,
        expert_records=records_experts(values),
        dp_size=arguments.dp_size,
        **_sampling_capabilities(options, values, diffusion),
        **_mode_capabilities(mode, diffusion),
        **_media_capabilities(mode, values, model_dir, from_encoders),
    )


def _media_capabilities(
    mode: LaunchMode, values: Mapping[str, Any], model_dir: Path, from_encoders: bool
) -> dict[str, Any]:
    """Return the media that an engine takes: of models whose grids Baton knows items that it has placed, else files."""
    modalities = _modalities(model_dir, values)
    if modalities == {"text"} or read_vision_model(model_dir) is None:
        return {"modalities": modalities}
    encodes = not from_encoders and mode.disaggregation != "decode"
    return {
        "media_embeddings": True,
        "media_encoding": encodes,
        "encoded_modalities": MODALITIES if encodes else frozenset(),
    }


def _sampling_capabilities(options: SglangOptions, values: Mapping[str, Any], diffusion: bool) -> dict[str, Any]:
    guides = options.guided and not diffusion and values.get("grammar_backend") != "none"
    return {
        "max_logprobs": None if diffusion else MAX_LOGPROBS,
        "guided": GUIDES if guides else frozenset(),
        "logit_bias": not diffusion,
        "stop_regex": options.guided and not diffusion,  # SGLang decodes its tokens to match them
        # Both need the token that ends reasoning, which SGLang has from its parser, and grammars.
        "guides_after_reasoning": bool(guides and values.get("reasoning_parser")),
        "max_thinking_tokens": guides and _applies_budgets(values),
    }


def _applies_budgets(values: Mapping[str, Any]) -> bool:
    """Return whether SGLang applies thinking budgets, and not only accepts them.

    It does where strict thinking filters anything: tokens that the parser excludes from reasoning, or those after a
    budget that is set for all requests.
    """
    if not (values.get("reasoning_parser") and values.get("enable_strict_thinking")):
        return False
    from sglang.srt.environ import envs
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    if envs.SGLANG_MAX_THINK_TOKENS.get() >= 0:
        return True
    try:
        parser = ReasoningParser(values["reasoning_parser"], stream_reasoning=False)
    except ValueError:  # `auto` and `response_template`, which need the model's tokenizer; the latter excludes none
        return False
    return bool(parser.detector.think_excluded_tokens)


def _mode_capabilities(mode: LaunchMode, diffusion: bool) -> dict[str, Any]:
    if mode.disaggregation != "null":
        return {
            "handoff": HandoffStyle.EARLY,
            "needs_kv": mode.disaggregation == "decode",
            "pause_modes": frozenset({"abort", "keep"}),
        }
    return {
        "prompt_logprobs": not diffusion,
        "max_choices": MAX_CHOICES,
        "pause_modes": frozenset({"abort", "keep"} if diffusion else {"abort", "keep", "retract"}),
    }


def facts_of(engine: Engine, snapshots: list[Snapshot]) -> Facts:
    """Return what a started engine reports; its schedulers have published their load once."""
    values = engine.server_args.resolved_dict()
    scheduler = engine._scheduler_init_result.scheduler_infos[0]
    manager = engine.tokenizer_manager
    max_prompt_tokens = int(scheduler["max_req_input_len"]) - 1
    return Facts(
        # With decode context parallelism a block of the prefix cache is a page of each rank.
        block_size=int(values["page_size"] or 1) * int(values.get("dcp_size") or 1),
        total_tokens=int(scheduler["max_total_num_tokens"]),
        max_running=sum(getattr(s, "max_running_requests", 0) for s in snapshots)
        or int(values["max_running_requests"] or 1),
        context=max_prompt_tokens + RESERVED_TOKENS,
        max_prompt_tokens=max_prompt_tokens,
        values=values,
        adapters=_adapters(manager) if values.get("enable_lora") else (),
        **_model_facts(manager.model_config if manager is not None else None),
    )


def engine_info(facts: Facts, mode: LaunchMode, arguments: Arguments, model_dir: Path, name: str) -> EngineInfo:
    """Return what a started engine serves."""
    has_bootstrap = mode.disaggregation == "prefill" and arguments.leader
    return EngineInfo(
        model_name=name,
        model_dir=str(model_dir),
        context_length=facts.context,
        block_size=facts.block_size,
        total_blocks=max(1, facts.total_tokens // facts.block_size),
        max_running=facts.max_running,
        max_batch_tokens=facts.values.get("max_prefill_tokens"),
        max_prompt_tokens=facts.max_prompt_tokens,
        vocab_size=facts.vocab_size or None,
        eos_token_ids=facts.eos_token_ids,
        reasoning_end_token=reasoning_end_token(model_dir),
        embedding_size=facts.hidden_size if mode.embedding else None,
        embedding_dimensions=facts.embedding_dimensions if mode.embedding else (),
        handoff_host=bootstrap_host(arguments.values["host"], arguments.values["dist_init_addr"])
        if has_bootstrap
        else None,
        handoff_port=int(facts.values["disaggregation_bootstrap_port"]) if has_bootstrap else None,
        leader=arguments.leader,
        group=arguments.values["dist_init_addr"] if int(arguments.values["nnodes"]) > 1 else None,
        adapters=facts.adapters,
    )


def default_priority(values: Mapping[str, Any]) -> int | None:
    """Return the priority of requests without one; None if SGLang runs without priorities.

    SGLang puts a request without a priority behind all others, also behind those with a negative one.
    """
    return int(values.get("default_priority_value") or 0) if values.get("enable_priority_scheduling") else None


def _adapters(manager: Manager | None) -> tuple[str, ...]:
    return tuple(sorted(manager.lora_registry.get_all_adapters())) if manager is not None else ()


def _model_facts(config: ModelConfig | None) -> dict[str, Any]:
    """Return what SGLang has read from config.json; a node that follows another has not."""
    if config is None:
        return {"vocab_size": 0, "eos_token_ids": (), "hidden_size": 0, "embedding_dimensions": ()}
    size = config.hidden_size
    return {
        "vocab_size": config.vocab_size,
        "eos_token_ids": tuple(sorted(config.hf_eos_token_id or ())),
        "hidden_size": size,
        "embedding_dimensions": shorter_sizes(config.matryoshka_dimensions or (), bool(config.is_matryoshka), size),
    }


def _weight_sources(values: Mapping[str, Any]) -> frozenset[str]:
    sources = {"disk"}
    if int(values["dp_size"]) == 1:
        sources |= {"tensors", "shared_memory", "group"}
        if values.get("device") != "cpu":
            sources.add("ipc")
    return frozenset(sources)


def _modalities(model_dir: Path, values: Mapping[str, Any]) -> frozenset[str]:
    """Return the modalities of the model, from its config.json."""
    if values.get("enable_multimodal") is False or values.get("language_model_only"):
        return frozenset({"text"})
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        log.warning("cannot read the modalities of the model, so only text is served: %s", error)
        return frozenset({"text"})
    config |= config.get("thinker_config") or {}
    found = {"text"}
    found |= {"image"} if "vision_config" in config else set()
    found |= {"audio"} if "audio_config" in config else set()
    found |= {"video"} if {"video_token_id", "video_token_index"} & config.keys() else set()
    return frozenset(found)
