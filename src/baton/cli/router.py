"""`baton router check`: see what a global router would do, before it does."""

import math
import sys
from pathlib import Path

import click

from baton.config.settings import Settings
from baton.errors import ConfigError
from baton.router.explain import Request, explain
from baton.router.render import draw_part
from baton.router.topology_file import Blueprint, read_blueprint

EXIT_CONFIG = 2
_TOKENS = click.IntRange(0, 10**12)


def _milliseconds(_context: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 <= value < math.inf:
        raise click.BadParameter(f"{value:g} is not a time of 0 or more")
    return value


@click.group()
def router() -> None:
    """Send each request to the pool of workers that can meet its targets."""


@router.command("check")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--isl", type=_TOKENS, help="tokens of a request's prompt")
@click.option("--osl", type=_TOKENS, help="tokens that the request may generate")
@click.option("--ttft-ms", type=float, callback=_milliseconds, help="its target for the time to the first token")
@click.option("--itl-ms", type=float, callback=_milliseconds, help="its target for the time between tokens")
@click.option("--priority", type=int, help="its priority")
@click.option(
    "--namespace",
    default=Settings().namespace,
    envvar="BATON_NAMESPACE",
    show_default=True,
    help="the router's namespace, from which those of its pools are made",
)
def check_command(
    file: Path,
    isl: int | None,
    osl: int | None,
    ttft_ms: float | None,
    itl_ms: float | None,
    priority: int | None,
    namespace: str,
) -> None:
    """Check FILE and draw which requests go to which pool; with options of a request, explain where that one goes."""
    try:
        blueprint = read_blueprint(file, namespace)
    except ConfigError as error:
        click.echo(f"baton: {error.message}", err=True)
        sys.exit(EXIT_CONFIG)
    request = Request(isl=isl, osl=osl, ttft_ms=ttft_ms, itl_ms=itl_ms, priority=priority)
    plan = blueprint.plan
    if request == Request():
        pictures = [draw_part(name, part) for name, part in plan.parts.items()]
    else:
        pictures = [explain(plan, name, request) for name in plan.parts]
    click.echo("\n\n".join([*pictures, _summary(blueprint)]))


def _summary(blueprint: Blueprint) -> str:
    plan = blueprint.plan
    axes = {axis.name for part in plan.parts.values() for axis in part.grid.axes}
    targets = [
        f"{name} is {'the middle of its axis' if default is None else f'{default:g}'}"
        for name, default in (("ttft_ms", plan.ttft_ms), ("itl_ms", plan.itl_ms))
        if name in axes or default is not None
    ]
    pools = ["faster pools"] * plan.retry.faster + ["other pools"] * plan.retry.others
    workers = [f"{one.count} for {one.part} pool {one.pool}" for one in blueprint.groups]
    rows = {
        "without targets": ", ".join(targets) or "nothing changes",
        "after a failure": " and then ".join(pools) or "no retry",
        "adaptive": "yes" if plan.adaptive else "no",
        "workers": ", ".join(workers) or "none are started from this file",
    }
    return "\n".join(f"{title:15}  {text}" for title, text in rows.items())
