"""`baton view`: the web view of a deployment that runs, on this machine or elsewhere."""

import asyncio
import sys
from typing import TYPE_CHECKING, Literal

import click

from baton.cli.exit_codes import EXIT_CONFIG, report_error
from baton.cli.settings_options import prepare_runtime
from baton.config.runtime import RuntimeOptions
from baton.config.settings import Settings
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.views.deployment import ProcessFinder
    from baton.views.server import ViewServer


@click.command()
@click.argument("processes", nargs=-1, metavar="[URL]...")
@click.option("--deployment", default="", help="port of the endpoint of one `baton serve`; without it, all are shown")
@click.option("--view-host", "host", default="127.0.0.1", show_default=True, help="address to listen on")
@click.option(
    "--view-port", "port", default=0, type=click.IntRange(0, 65535), help="port to listen on; 0: any free one"
)
@click.option(
    "--view-token",
    "token",
    default="",
    envvar="BATON_VIEW_TOKEN",
    help="token that browsers need; without it, none on a loopback address, elsewhere a generated one",
)
@click.option(
    "--runtime-discovery",
    "discovery",
    type=click.Choice(["file", "etcd", "kubernetes"]),
    default="file",
    envvar="BATON_RUNTIME_DISCOVERY",
    help="where to look for processes. file: those of this user on this machine. etcd, kubernetes: on all hosts",
)
@click.option(
    "--runtime-etcd",
    "etcd",
    default=RuntimeOptions().etcd,
    show_default=True,
    envvar="BATON_RUNTIME_ETCD",
    help="comma-separated etcd addresses",
)
@click.option(
    "--namespace",
    default=Settings().namespace,
    show_default=True,
    envvar="BATON_NAMESPACE",
    help="with etcd or kubernetes: how the discovery namespaces of the processes to show begin",
)
@click.option("--endpoint", help="URL of the OpenAI endpoint that chats go to; without it, that of a frontend shown")
@click.option("--api-key", envvar="BATON_API_KEY", help="API key for chats; prefer BATON_API_KEY")
@click.option(
    "--control-token",
    default="",
    envvar="BATON_CONTROL_TOKEN",
    help="control token of processes that were given one; prefer BATON_CONTROL_TOKEN",
)
def view(
    processes: tuple[str, ...],
    deployment: str,
    host: str,
    port: int,
    token: str,
    discovery: Literal["file", "etcd", "kubernetes"],
    etcd: str,
    namespace: str,
    endpoint: str | None,
    api_key: str | None,
    control_token: str,
) -> None:
    """Serve a web page that shows a running deployment live: its processes, requests and latency, and a chat.

    Shows the processes of this user on this machine, those in discovery on several hosts, or those at the given URLs
    of system servers and endpoints.
    """
    from baton.views.deployment import GivenProcesses, LocalProcesses
    from baton.views.server import ViewServer

    def server(finder: "ProcessFinder") -> ViewServer:
        chats_to = endpoint.rstrip("/") if endpoint else None
        return ViewServer(finder, host=host, port=port, token=token, endpoint=chats_to, api_key=api_key)

    try:
        if processes:
            asyncio.run(_serve(server(GivenProcesses(processes, control_token))))
        elif discovery == "file":
            asyncio.run(_serve(server(LocalProcesses(deployment, control_token))))
        else:
            settings = Settings(runtime=RuntimeOptions(discovery=discovery, etcd=etcd), namespace=namespace)
            asyncio.run(_serve_discovered(server, prepare_runtime(settings), control_token))
    except ConfigError as error:
        sys.exit(report_error(error.message, EXIT_CONFIG))


async def _serve_discovered(
    server: "Callable[[ProcessFinder], ViewServer]", settings: Settings, control_token: str
) -> None:
    """Serve the view of the processes in discovery, as a member of the cluster that serves nothing."""
    from baton.process.location_service import LOCATION_PATH
    from baton.runtimes.dynamo.runtime import DynamoRuntime
    from baton.views.discovered import DiscoveredProcesses

    runtime = DynamoRuntime(settings.runtime)
    await runtime.start()
    try:
        await _serve(server(DiscoveredProcesses(runtime, LOCATION_PATH, settings.namespace, control_token)))
    finally:
        await runtime.shutdown()


async def _serve(server: "ViewServer") -> None:
    from baton.process.signals import stop_on_signals

    stop = stop_on_signals()
    try:
        await server.start()
        click.echo(f"The view is on {server.url}")
        sys.stdout.flush()
        await stop.wait()
    finally:
        await server.aclose()
