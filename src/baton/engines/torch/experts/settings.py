"""The `experts` settings of the built-in engine, resolved for one model. Imports no torch."""

from pathlib import Path
from typing import Literal, cast

import msgspec

from baton.config.engines import ExpertOptions
from baton.engines.torch.experts.limits import BalancerOptions, Mode
from baton.engines.torch.models.experts import ExpertShape
from baton.errors import ConfigError
from baton.experts.placement import Algorithm, Layout, Shape, check, plan, trivial
from baton.experts.settings import (
    DEFAULTS,
    SHARED_RULES,
    Contradiction,
    InitialLayout,
    Ranks,
    read_initial_layout,
    recorder_mode,
    refuse_contradictions,
)


class ExpertSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the settings mean for one model. `layout` is the initial one, a row per sparse layer of `sparse`.

    `record_passes` bounds the recorder, None: by its bytes alone.
    """

    shape: Shape
    layers: int
    sparse: tuple[int, ...]
    layout: Layout
    dispatch: Literal["static", "dynamic"]
    recorder: Mode | None
    record_passes: int | None
    balancer: BalancerOptions | None
    report_log: bool
    report_metrics: bool


def resolve_experts(options: ExpertOptions, experts: ExpertShape | None, layers: int) -> ExpertSettings | None:
    """Return the settings for a model with these experts and `layers` layers; None for a dense model.

    Reads the layout's file, so not for the event loop. Raises ConfigError for settings that contradict each other or
    the model.
    """
    if experts is None:
        refuse_without_experts(options)
        return None
    refuse_contradictions(options, None, _RULES)
    refuse_contradictions(options, Ranks(options.ranks, "set experts.ranks above 1"), SHARED_RULES)
    shape = Shape(
        experts=experts.count,
        redundant=options.redundant,
        ranks=options.ranks,
        nodes=options.nodes,
        groups=experts.groups,
    )
    algorithm = cast("Algorithm", options.algorithm)
    check(shape, algorithm)
    initial = read_initial_layout(options, options.ranks)
    mode = recorder_mode(options)
    return ExpertSettings(
        shape=shape,
        layers=layers,
        sparse=experts.layers,
        layout=_initial_rows(initial, experts, layers, shape, algorithm),
        dispatch="static" if options.dispatch == "static" else "dynamic",
        recorder=None if mode == "off" else cast("Mode", mode),
        record_passes=None if options.recorder_buffer == -1 else options.recorder_buffer or options.interval,
        balancer=_balancer(options, algorithm) if options.eplb else None,
        report_log=options.report in ("server_log", "both"),
        report_metrics=options.report in ("prometheus", "both"),
    )


def refuse_without_experts(options: ExpertOptions) -> None:
    """Raise ConfigError if a model without experts gets settings for them."""
    given = [name for name in options.__struct_fields__ if getattr(options, name) != getattr(DEFAULTS, name)]
    if given:
        raise ConfigError(f"experts.{given[0]}: the model has no experts; drop the --experts-* settings")


def _balancer(options: ExpertOptions, algorithm: Algorithm) -> BalancerOptions:
    window = options.recorder_buffer if options.recorder_buffer > 0 else options.interval
    return BalancerOptions(
        interval=options.interval,
        window=min(window, options.interval),
        layers_per_chunk=options.layers_per_chunk,
        utilization_threshold=options.utilization_threshold,
        algorithm=algorithm,
        approximate=options.recorder == "stat_approx",
    )


def _initial_rows(
    initial: InitialLayout | None, experts: ExpertShape, layers: int, shape: Shape, algorithm: Algorithm
) -> Layout:
    if initial is None:
        return [trivial(shape) for _ in experts.layers]
    if initial.layout is not None:
        _check_fit(initial.path, len(initial.layout), max(initial.layout[0]) + 1, experts, layers)
        return [initial.layout[layer] for layer in experts.layers]
    counts = initial.counts or [[]]
    _check_fit(initial.path, len(counts), len(counts[0]), experts, layers)
    return plan([counts[layer] for layer in experts.layers], shape, algorithm)


def _check_fit(path: Path, rows: int, count: int, experts: ExpertShape, layers: int) -> None:
    if (rows, count) != (layers, experts.count):
        raise ConfigError(
            f"{path} is for {rows} layers of {count} experts; this model has {layers} layers of {experts.count} experts"
        )


_RULES: tuple[Contradiction[None], ...] = (
    Contradiction(
        lambda options, _: options.algorithm not in ("auto", "global", "hierarchical"),
        "experts.algorithm: {options.algorithm} is SGLang's; the engine torch has auto, global and hierarchical",
    ),
    Contradiction(
        lambda options, _: options.dispatch in ("fake", "lp"),
        "experts.dispatch: {options.dispatch} is SGLang's; the engine torch has static and dynamic",
    ),
    Contradiction(
        lambda options, _: options.recorder_buffer != 0 and recorder_mode(options) == "off",
        "experts.recorder_buffer: nothing is recorded; set experts.recorder",
    ),
)
