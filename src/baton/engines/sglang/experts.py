"""Settings of SGLang's expert-parallel load balancing, and the arguments they become. Imports no SGLang."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from baton.config.engines import DEFAULT_REBALANCE_INTERVAL, TRIVIAL_LAYOUT, ExpertOptions
from baton.experts.settings import (
    COUNTING,
    DEFAULTS,
    SHARED_RULES,
    Contradiction,
    Ranks,
    layout_path,
    read_initial_layout,
    recorder_mode,
    refuse_contradictions,
)


class Parallelism(NamedTuple):
    """How SGLang distributes experts. `ep_size` is what it resolves: with an all-to-all backend, its `--tp-size`."""

    ep_size: int
    a2a_backend: str = "none"
    deepep_mode: str = "auto"
    device: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Parallelism":
        """Return the one of SGLang's parsed arguments."""
        backend = str(values["moe_a2a_backend"] or "none")
        ep_size = int(values["ep_size"] if backend == "none" else values["tp_size"])
        return cls(ep_size, backend, str(values["deepep_mode"]), values["device"])


def expert_arguments(options: ExpertOptions, parallelism: Parallelism) -> list[str]:
    """Return SGLang's arguments, none for what is as SGLang has it anyway.

    Reads the layout's file, so not for the event loop. Raises ConfigError for settings that contradict each other or
    that SGLang would ignore, and for a layout that SGLang would fail on or, worse, misread.
    """
    refuse_contradictions(options, parallelism, _OTHER_ENGINES)
    refuse_contradictions(options, Ranks(parallelism.ep_size, "give SGLang an --ep-size above 1"), SHARED_RULES)
    refuse_contradictions(options, parallelism, _CONTRADICTIONS)
    read_initial_layout(options, parallelism.ep_size)
    values = {
        "--ep-num-redundant-experts": (options.redundant, 0),
        "--expert-distribution-recorder-mode": (options.recorder, "off"),
        "--expert-distribution-recorder-buffer-size": (options.recorder_buffer, 0),
        "--init-expert-location": (layout_path(options), TRIVIAL_LAYOUT),
        "--eplb-algorithm": (options.algorithm, "auto"),
        "--eplb-rebalance-num-iterations": (options.interval, DEFAULT_REBALANCE_INTERVAL),
        "--eplb-rebalance-layers-per-chunk": (options.layers_per_chunk, 0),
        "--eplb-min-rebalancing-utilization-threshold": (options.utilization_threshold, 1.0),
        "--ep-dispatch-algorithm": (options.dispatch, "auto"),
        "--expert-balancedness-report-mode": (options.report, "off"),
    }
    given = [text for name, (value, default) in values.items() if value != default for text in (name, str(value))]
    return ["--enable-eplb", *given] if options.eplb else given


def records_experts(values: Mapping[str, Any]) -> bool:
    """Return whether SGLang runs its recorder with these parsed arguments: rebalancing and reports turn it on."""
    return bool(
        values.get("expert_distribution_recorder_mode")
        or values.get("enable_eplb")
        or values.get("expert_balancedness_report_mode", "off") != "off"
    )


_OTHER_ENGINES: tuple[Contradiction[Parallelism], ...] = (
    Contradiction(
        lambda options, _: (options.ranks, options.nodes) != (DEFAULTS.ranks, DEFAULTS.nodes),
        "experts.ranks and experts.nodes are for the engine torch; SGLang has --ep-size and --nnodes, after --",
    ),
    Contradiction(
        lambda options, _: options.algorithm in ("global", "hierarchical"),
        "experts.algorithm: {options.algorithm} is for the engine torch; SGLang has auto, deepseek, deepseek_vec,"
        " elasticity_aware, and the same with _hierarchical",
    ),
)

_CONTRADICTIONS: tuple[Contradiction[Parallelism], ...] = (
    Contradiction(
        lambda options, _: (
            options.redundant > 0
            and not options.eplb
            and (options.layout, options.dispatch) == (DEFAULTS.layout, DEFAULTS.dispatch)
        ),
        "experts.redundant: no token is sent to the copies; add experts.eplb, experts.layout or experts.dispatch",
    ),
    Contradiction(
        lambda options, _: options.utilization_threshold < 1 and options.report == "off",
        "experts.utilization_threshold: SGLang measures utilisation only with experts.report; set that too",
    ),
    Contradiction(
        lambda options, ranks: options.utilization_threshold < 1 and ranks.device == "cpu",
        "experts.utilization_threshold: SGLang measures utilisation on GPUs only; drop it with --device cpu",
    ),
    Contradiction(
        lambda options, ranks: (
            recorder_mode(options) == "stat_approx"
            and ranks.a2a_backend != "mori"
            and (ranks.a2a_backend == "none" or ranks.deepep_mode != "normal")
        ),
        "experts.recorder: stat_approx needs DeepEP in normal mode; add `--moe-a2a-backend deepep --deepep-mode normal`"
        " to the engine's arguments, or use stat",
    ),
    Contradiction(
        lambda options, ranks: (
            recorder_mode(options) in ("stat", "per_pass")
            and (ranks.a2a_backend, ranks.deepep_mode) == ("deepep", "auto")
        ),
        "experts.recorder: SGLang does not record with --deepep-mode auto; set normal or low_latency",
    ),
    Contradiction(
        lambda options, _: options.recorder_buffer != 0 and recorder_mode(options) not in COUNTING,
        "experts.recorder_buffer is for a recorder that counts: experts.recorder must be stat or stat_approx, not"
        " {options.recorder}",
    ),
    Contradiction(
        lambda options, ranks: options.dispatch in ("static", "lp") and ranks.a2a_backend == "none",
        "experts.dispatch: {options.dispatch} needs an all-to-all backend (--moe-a2a-backend); without one every rank"
        " computes every token, and all ranks must choose the same copy: use dynamic",
    ),
)
