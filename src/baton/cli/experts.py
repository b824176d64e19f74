"""`baton experts`: plan an expert layout from the recorder dump of a worker."""

import sys
from pathlib import Path

import click

from baton.errors import ConfigError
from baton.experts.files import check_suffix, read_counts, write_layout
from baton.experts.placement import Algorithm, Balance, Shape, check, measure, plan, resolve, trivial

EXIT_CONFIG = 2
_COUNT = click.IntRange(min=1)


@click.group()
def experts() -> None:
    """Balance the experts of a mixture-of-experts model over ranks."""


@experts.command("plan")
@click.argument("dump", type=click.Path(path_type=Path))
@click.option("--ranks", type=_COUNT, required=True, help="ranks of the worker: --experts-ranks, or SGLang's --ep-size")
@click.option("--nodes", type=_COUNT, default=1, show_default=True, help="number of nodes with these ranks")
@click.option("--redundant", type=click.IntRange(min=0), default=0, show_default=True, help="extra copies of experts")
@click.option("--groups", type=_COUNT, help="expert groups of the model (n_group in its config.json)")
@click.option(
    "--algorithm",
    type=click.Choice(["auto", "global", "hierarchical"]),
    default="auto",
    show_default=True,
    help="hierarchical keeps each expert group on one node; auto does so if the nodes divide the groups",
)
@click.option("--out", type=click.Path(path_type=Path), help="output file of the layout: .json or .pt")
def plan_command(
    dump: Path, ranks: int, nodes: int, redundant: int, groups: int | None, algorithm: Algorithm, out: Path | None
) -> None:
    """Plan a layout from DUMP, the file of a recorder in mode stat: .pt or .json with logical_count."""
    try:
        if out is not None:
            check_suffix(out)
            _refuse_same_file(dump, out)
        counts = read_counts(dump)
        shape = Shape(experts=len(counts[0]), redundant=redundant, ranks=ranks, nodes=nodes, groups=groups or 0)
        check(shape, algorithm)
        layout = plan(counts, shape, algorithm)
        before = measure(counts, [trivial(shape)] * len(counts), ranks)
        after = measure(counts, layout, ranks)
        used = sum(any(row) for row in counts)
        click.echo(_summary(len(counts), used, shape, resolve(shape, algorithm)) + _table(before, after))
        if out is not None:
            write_layout(out, layout)
        click.echo(_next_step(out, ranks, redundant))
    except ConfigError as error:
        click.echo(f"baton: {error.message}", err=True)
        sys.exit(EXIT_CONFIG)


def _refuse_same_file(dump: Path, out: Path) -> None:
    if out.exists() and dump.exists() and out.samefile(dump):
        raise ConfigError(f"{out} is the dump itself: choose another file for the layout")


def _summary(layers: int, used: int, shape: Shape, algorithm: str) -> str:
    nodes = f" of {shape.nodes} nodes" if shape.nodes > 1 else ""
    idle = f", {layers - used} of them without load" if used < layers else ""
    return (
        f"{layers} layers{idle}; {shape.experts} experts and {shape.redundant} redundant on"
        f" {shape.ranks} ranks{nodes}, {shape.size} slots each; {algorithm}\n\n"
    )


def _table(before: Balance, after: Balance) -> str:
    lines = [
        ("", "trivial", "planned"),
        ("balancedness, mean of layers", f"{before.balancedness:.3f}", f"{after.balancedness:.3f}"),
        ("balancedness, worst layer", *(f"{each.worst:.3f} (layer {each.worst_layer})" for each in (before, after))),
        ("busiest rank / mean rank", *(f"{each.peak:.2f}x" for each in (before, after))),
        ("busiest rank / mean, worst layer", *(f"{1 / each.worst:.2f}x" for each in (before, after))),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _next_step(out: Path | None, ranks: int, redundant: int) -> str:
    if out is None:
        return "\nThe layout was not written; use --out FILE to write it."
    layout = f"--experts-layout {out}" + (f" --experts-redundant {redundant}" if redundant else "")
    return (
        f"\nWrote {out}. Start the worker with it, one of:\n\n"
        f"  baton worker --engine torch {layout} --experts-ranks {ranks}\n"
        f"  baton worker --engine sglang {layout} -- --ep-size {ranks}\n\n"
        f"or SGLang itself with --init-expert-location {out}"
        + (f" --ep-num-redundant-experts {redundant}" if redundant else "")
    )
