"""Settings of SGLang's expert-parallel load balancing, and the arguments they become. Imports no SGLang."""

from pathlib import Path

from baton.config.engines import DEFAULT_REBALANCE_INTERVAL, TRIVIAL_LAYOUT, ExpertOptions
from baton.errors import ConfigError
from baton.experts.files import COUNTS_KEY, LAYOUT_KEY, counts_in, layout_in, read_content

_COUNTING = ("stat", "stat_approx")


def expert_arguments(options: ExpertOptions, ep_size: int) -> list[str]:
    """Return SGLang's arguments, none for what is as SGLang has it anyway.

    `ep_size` is what SGLang ends up with: with an all-to-all backend, that is its tensor-parallel size. Reads the
    layout's file, so not for the event loop. Raises ConfigError for settings that contradict each other, and for a
    layout that SGLang would fail on or, worse, misread.
    """
    _refuse_contradictions(options, ep_size)
    planned = _check_layout(options, ep_size)
    if options.algorithm != "auto" and not (options.eplb or planned == COUNTS_KEY):
        raise ConfigError("experts.algorithm is for experts.eplb, or a layout file with counts: drop it or add one")
    values = {
        "--ep-num-redundant-experts": (options.redundant, 0),
        "--expert-distribution-recorder-mode": (options.recorder, "off"),
        "--expert-distribution-recorder-buffer-size": (options.recorder_buffer, 0),
        "--init-expert-location": (layout_path(options), TRIVIAL_LAYOUT),
        "--eplb-algorithm": (options.algorithm, "auto"),
        "--eplb-rebalance-num-iterations": (options.interval, DEFAULT_REBALANCE_INTERVAL),
        "--expert-balancedness-report-mode": (options.report, "off"),
    }
    given = [text for name, (value, default) in values.items() if value != default for text in (name, str(value))]
    return ["--enable-eplb", *given] if options.eplb else given


def layout_path(options: ExpertOptions) -> str:
    """Return the layout as SGLang takes it, with `~` expanded."""
    return TRIVIAL_LAYOUT if options.layout == TRIVIAL_LAYOUT else str(Path(options.layout).expanduser().absolute())


def _refuse_contradictions(options: ExpertOptions, ep_size: int) -> None:
    if options.eplb and ep_size <= 1:
        raise ConfigError("experts.eplb needs expert parallelism: give SGLang an --ep-size above 1")
    if options.redundant and ep_size <= 1:
        raise ConfigError("experts.redundant needs expert parallelism: copies on one rank only take memory")
    if options.eplb and options.recorder not in ("off", *_COUNTING):
        raise ConfigError(
            f"experts.eplb needs counts: experts.recorder must be stat or stat_approx, not {options.recorder}"
        )
    if options.interval != DEFAULT_REBALANCE_INTERVAL and not options.eplb:
        raise ConfigError("experts.interval is the time between rebalances of experts.eplb, which is off")
    if options.recorder_buffer:
        _check_buffer(options)


def _check_buffer(options: ExpertOptions) -> None:
    counts = options.recorder in _COUNTING or (options.recorder == "off" and (options.eplb or options.report != "off"))
    if not counts:
        raise ConfigError(
            "experts.recorder_buffer is for a recorder that counts: experts.recorder must be stat or stat_approx, not"
            f" {options.recorder}"
        )
    if options.eplb and options.recorder_buffer > options.interval:
        raise ConfigError(
            f"experts.recorder_buffer ({options.recorder_buffer}) must not be larger than experts.interval"
            f" ({options.interval}), or a rebalance goes by passes of the layout before"
        )


def _check_layout(options: ExpertOptions, ep_size: int) -> str | None:
    """Return the key that SGLang goes by, None without a file."""
    if options.layout == TRIVIAL_LAYOUT:
        return None
    path = Path(layout_path(options))
    content = read_content(path)
    if LAYOUT_KEY in content:
        row = layout_in(content, path)[0]
        slots, experts = len(row), max(row) + 1
        if slots - experts != options.redundant:
            raise ConfigError(
                f"{path} has {slots} slots for {experts} experts: set experts.redundant to {slots - experts},"
                f" not {options.redundant}"
            )
        key = LAYOUT_KEY
    elif COUNTS_KEY in content:
        slots, key = len(counts_in(content, path)[0]) + options.redundant, COUNTS_KEY
    else:
        raise ConfigError(f"{path} holds neither {LAYOUT_KEY} nor {COUNTS_KEY}")
    if slots % max(ep_size, 1):
        raise ConfigError(f"{path}: {slots} slots for experts do not divide over {ep_size} ranks")
    return key
