"""`baton router check`: validate a topology file and show which pool each request goes to."""

import math
import sys
from pathlib import Path

import click
import msgspec

from baton.config.settings import Settings
from baton.errors import ConfigError
from baton.router.plan import Plan
from baton.router.render import ExampleRequest, render_decision, render_role
from baton.router.topology_file import TopologyFile, read_topology

EXIT_CONFIG = 2
_TOKENS = click.IntRange(0, 10**12)


def _milliseconds(_context: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 <= value < math.inf:
        raise click.BadParameter(f"{value:g} must be 0 or more, and finite")
    return value


@click.group()
def router() -> None:
    """Route each request to the pool of workers that can meet its latency targets."""


@router.command("check")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--isl", type=_TOKENS, help="prompt tokens of an example request")
@click.option("--osl", type=_TOKENS, help="output tokens that the request allows")
@click.option(
    "--ttft-ms",
    type=float,
    callback=_milliseconds,
    help="its target for the time to first token",
)
@click.option(
    "--itl-ms",
    type=float,
    callback=_milliseconds,
    help="its target for the time between tokens",
)
@click.option("--priority", type=int, help="its priority")
@click.option(
    "--namespace",
    default=Settings().namespace,
    envvar="BATON_NAMESPACE",
    show_default=True,
    help="namespace of the router; the default namespaces of its pools start with it",
)
@click.option(
    "--default-ttft-ms",
    type=float,
    callback=_milliseconds,
    help="target of requests that set none, as given to the router",
)
@click.option(
    "--default-itl-ms",
    type=float,
    callback=_milliseconds,
    help="target of requests that set none, as given to the router",
)
@click.option("--pool-endpoint", default="", help="endpoint of pools without one in FILE, as given to the router")
def check_command(
    file: Path,
    isl: int | None,
    osl: int | None,
    ttft_ms: float | None,
    itl_ms: float | None,
    priority: int | None,
    namespace: str,
    default_ttft_ms: float | None,
    default_itl_ms: float | None,
    pool_endpoint: str,
) -> None:
    """Validate FILE and show which requests go to which pool.

    With options of a request, also explain where that request goes.
    """
    try:
        topology = read_topology(file, namespace, pool_endpoint)
    except ConfigError as error:
        click.echo(f"baton: {error.message}", err=True)
        sys.exit(EXIT_CONFIG)
    request = ExampleRequest(isl=isl, osl=osl, ttft_ms=ttft_ms, itl_ms=itl_ms, priority=priority)
    plan = topology.plan.with_default_targets(default_ttft_ms, default_itl_ms)
    topology = msgspec.structs.replace(topology, plan=plan)
    if request == ExampleRequest():
        sections = [render_role(role, role_plan) for role, role_plan in plan.roles.items()]
    else:
        sections = [render_decision(plan, role, request) for role in plan.roles]
    click.echo("\n\n".join([*sections, _summary(topology)]))


def _summary(topology: TopologyFile) -> str:
    plan = topology.plan
    retry = ["faster pools"] * plan.retry.faster + ["other pools"] * plan.retry.others
    workers = [f"{group.count} for {group.role} pool {group.pool}" for group in topology.groups]
    rows = {
        "default targets": ", ".join(_default_targets(plan)) or "none",
        "retry in": ", then ".join(retry) or "no pool",
        "adaptive": "yes" if plan.adaptive else "no",
        "workers": ", ".join(workers) or "none are started from this file",
    }
    return "\n".join(f"{title:15}  {text}" for title, text in rows.items())


def _default_targets(plan: Plan) -> list[str]:
    """Return the targets of requests that set none, for each time axis of the plan."""
    axes = {axis.name for role_plan in plan.roles.values() for axis in role_plan.grid.axes}
    targets = {"ttft_ms": plan.ttft_ms, "itl_ms": plan.itl_ms}
    texts = {name: "the middle of its axis" if value is None else f"{value:g}" for name, value in targets.items()}
    return [f"{name} is {texts[name]}" for name, value in targets.items() if name in axes or value is not None]
