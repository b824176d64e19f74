"""Checks of the `experts` settings that every engine shares, and the initial layout. Imports no engine."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from baton.config.engines import TRIVIAL_LAYOUT, ExpertOptions
from baton.errors import ConfigError
from baton.experts.files import COUNTS_KEY, LAYOUT_KEY, counts_in, layout_in, read_content
from baton.experts.placement import Layout

COUNTING = ("stat", "stat_approx")
DEFAULTS = ExpertOptions()

P = TypeVar("P")


class Contradiction(NamedTuple, Generic[P]):
    """A combination of settings, with an engine's parallelism, that is refused, and the message with what to do.

    The message may contain `{options...}` and `{parallelism...}`.
    """

    holds: Callable[[ExpertOptions, P], bool]
    message: str


class Ranks(NamedTuple):
    """The number of expert-parallel ranks, and what to do to get more."""

    size: int
    more: str


def refuse_contradictions(options: ExpertOptions, parallelism: P, rules: Sequence[Contradiction[P]]) -> None:
    """Raise ConfigError for the first rule that holds."""
    for rule in rules:
        if rule.holds(options, parallelism):
            raise ConfigError(rule.message.format(options=options, parallelism=parallelism))


def recorder_mode(options: ExpertOptions) -> str:
    """Return the mode of the recorder: rebalancing and reports turn it on."""
    implied = options.recorder == "off" and (options.eplb or options.report != "off")
    return "stat" if implied else options.recorder


def moves_experts(options: ExpertOptions) -> bool:
    """Return whether experts may be elsewhere than in the model's files."""
    return options.eplb or options.redundant > 0 or options.layout != TRIVIAL_LAYOUT


class InitialLayout(NamedTuple):
    """What the file of `experts.layout` has: a layout, or the counts to plan one from. A row per layer of the model."""

    path: Path
    layout: Layout | None = None
    counts: list[list[float]] | None = None


def layout_path(options: ExpertOptions) -> str:
    """Return the layout as engines take it, with `~` expanded."""
    return TRIVIAL_LAYOUT if options.layout == TRIVIAL_LAYOUT else str(Path(options.layout).expanduser().absolute())


def read_initial_layout(options: ExpertOptions, ranks: int) -> InitialLayout | None:
    """Return the content of the layout's file, None without one; blocks while it reads.

    Raises ConfigError for a file that SGLang would not take, and for one that does not fit the other settings.
    """
    initial = None if options.layout == TRIVIAL_LAYOUT else _read(Path(layout_path(options)), options, ranks)
    if options.algorithm != "auto" and not (options.eplb or (initial and initial.counts)):
        raise ConfigError("experts.algorithm is for experts.eplb, or a layout file with counts: drop it or add one")
    return initial


def _read(path: Path, options: ExpertOptions, ranks: int) -> InitialLayout:
    content = read_content(path)
    if LAYOUT_KEY in content:
        initial = InitialLayout(path, layout=layout_in(content, path))
        slots = _slots_of_layout(initial, options)
    elif COUNTS_KEY in content:
        initial = InitialLayout(path, counts=counts_in(content, path))
        slots = len((initial.counts or [[]])[0]) + options.redundant
    else:
        raise ConfigError(f"{path} holds neither {LAYOUT_KEY} nor {COUNTS_KEY}")
    if slots % max(ranks, 1):
        raise ConfigError(f"{path}: {slots} slots for experts do not divide over {ranks} ranks")
    return initial


def _slots_of_layout(initial: InitialLayout, options: ExpertOptions) -> int:
    row = (initial.layout or [[]])[0]
    slots, experts = len(row), max(row) + 1
    if slots - experts != options.redundant:
        raise ConfigError(
            f"{initial.path} has {slots} slots for {experts} experts: set experts.redundant to {slots - experts},"
            f" not {options.redundant}"
        )
    return slots


SHARED_RULES: tuple[Contradiction[Ranks], ...] = (
    Contradiction(
        lambda options, ranks: options.eplb and ranks.size <= 1,
        "experts.eplb needs expert parallelism: {parallelism.more}",
    ),
    Contradiction(
        lambda options, ranks: options.redundant > 0 and ranks.size <= 1,
        "experts.redundant needs expert parallelism: copies on one rank only take memory",
    ),
    Contradiction(
        lambda options, _: options.eplb and options.recorder not in ("off", *COUNTING),
        "experts.eplb needs counts: experts.recorder must be stat or stat_approx, not {options.recorder}",
    ),
    Contradiction(
        lambda options, _: options.interval != DEFAULTS.interval and not options.eplb,
        "experts.interval is the time between rebalances of experts.eplb, which is off",
    ),
    Contradiction(
        lambda options, _: options.layers_per_chunk > 0 and not options.eplb,
        "experts.layers_per_chunk divides a rebalance of experts.eplb, which is off",
    ),
    Contradiction(
        lambda options, _: options.utilization_threshold < 1 and not options.eplb,
        "experts.utilization_threshold is a condition for rebalances of experts.eplb, which is off",
    ),
    Contradiction(
        lambda options, _: options.eplb and options.recorder_buffer > options.interval,
        "experts.recorder_buffer ({options.recorder_buffer}) must not be larger than experts.interval"
        " ({options.interval}), or a rebalance goes by passes of the layout before",
    ),
    Contradiction(
        lambda options, _: options.dispatch not in ("auto", "fake") and not moves_experts(options),
        "experts.dispatch chooses among copies of an expert: add experts.redundant, experts.layout or experts.eplb",
    ),
)
