"""The frontend process: the runtime's frontend on loopback, and the edge on the public address, until it is stopped."""

import asyncio
import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from baton.config.directories import control_directory, process_directory, shared_directory
from baton.config.load import control_token, listed
from baton.config.settings import Settings, open_endpoint_warning
from baton.control.http.token_file import generate_token, published_token
from baton.control.process_entries import published_entry
from baton.edge.access import Access, ApiKeys, KeyLimits
from baton.edge.counts import EdgeCounts
from baton.edge.limits import MIB, edge_limits
from baton.edge.models import KnownModels
from baton.edge.own_routes import own_routes
from baton.edge.public_routes import public_routes
from baton.edge.routes import RouteTable
from baton.edge.server import Edge, tls_context
from baton.edge.upstream import UpstreamPool
from baton.errors import BatonError, ConfigError, EngineDead
from baton.metrics.exposition import join
from baton.metrics.process import process_registry
from baton.process.location_service import http_url, reachable_host, serve_location
from baton.process.metrics_targets import deployment_targets
from baton.process.process_reports import ProcessReports, ProcessStatus, own_name
from baton.process.service_process import collect_less, unless_stopped
from baton.process.signals import stop_on_signals
from baton.runtimes.dynamo.frontend import HOST, DynamoFrontend
from baton.runtimes.dynamo.listener import refuse_unusable_address
from baton.runtimes.dynamo.metric_units import with_base_units
from baton.runtimes.dynamo.routing import router_config, selects_by_adapter
from baton.status.sd_notify import notify, send_heartbeats
from baton.timelines.reports import AboutReply, TimelinesReply

log = logging.getLogger(__name__)

# The components of the processes that register models for clients: workers, and global routers.
_MODEL_COMPONENTS = ("worker", "decode", "process", "router")


def run_frontend(settings: Settings) -> int:
    """Run the frontend until it is stopped; return its exit code."""
    import uvloop

    return uvloop.run(_main(settings))


async def _main(settings: Settings) -> int:
    refuse_unusable_address(settings.host, settings.port, "--host", "--port")
    stop = stop_on_signals(drain_timeout_s=settings.drain_timeout_s)
    frontend = DynamoFrontend(
        settings.runtime,
        settings.namespace,
        router_config(settings),
        selects_by_adapter(settings),
        settings.migrations,
        settings.drain_timeout_s,
        backend_timeout_s=settings.request_timeout_s + settings.drain_timeout_s,
        body_limit_mb=settings.body_limit_mb,
        model_endpoints=[f"{settings.namespace}.{component}.generate" for component in _MODEL_COMPONENTS],
    )
    given = control_token(settings)
    token = given or generate_token()
    pool = UpstreamPool(HOST, guard=frontend)
    reports = FrontendReports(settings)
    edge = build_edge(settings, pool, token, frontend, reports)
    heartbeat = asyncio.create_task(send_heartbeats(stop.set), name="heartbeat")
    try:
        await frontend.start()
        pool.port = frontend.port
        await edge.start(settings.host, settings.port)
        url = _url(reachable_host(settings.host, settings), edge, settings)
        await serve_location(frontend.serve, settings, "frontend", url)
        with _entry(edge, settings), nullcontext() if given else _published(edge, token):
            _report(settings, edge.port)
            collect_less()
            if await unless_stopped(stop, frontend.wait()) and not stop.is_set():
                raise EngineDead("the frontend has ended by itself")
    except BatonError as error:
        if error.code == "config":
            raise
        log.critical("%s", error.message)
        return 1
    finally:
        edge.drain()
        await frontend.stop()
        await edge.aclose()
        await reports.aclose()
        heartbeat.cancel()
    return 0


def build_edge(
    settings: Settings, pool: UpstreamPool, token: str, frontend: DynamoFrontend, reports: "FrontendReports"
) -> Edge:
    """Return the edge for these settings. Raises ConfigError."""
    limits = KeyLimits(
        requests_per_minute=settings.key_requests_per_minute, max_concurrency=settings.key_max_concurrency
    )
    file = Path(settings.api_key_file).expanduser() if settings.api_key_file else None
    keys = ApiKeys(listed(settings.api_key), file, limits)
    counts = EdgeCounts(process_registry("frontend", settings.first_name))

    def exposition(frontend_metrics: str) -> str:
        return join([counts.exposition(), with_base_units(frontend_metrics)])

    return Edge(
        pool,
        Access(keys, token, frozenset(listed(settings.cors_origins))),
        KnownModels([settings.name] if settings.name else [], settings.start_timeout_s),
        edge_limits(settings.body_limit_mb * MIB),
        RouteTable(public_routes(own_routes(frontend, exposition, deployment_targets(settings), reports))),
        tls_context(settings.tls_certificate, settings.tls_key),
        frontend.take_reason,
        counts,
        reports.ring,
    )


class FrontendReports:
    """What a frontend reports on the admin routes of its edge."""

    def __init__(self, settings: Settings) -> None:
        self._reports = ProcessReports(settings, "frontend")
        self.ring = self._reports.timelines

    async def aclose(self) -> None:
        """See `ProcessReports.aclose`."""
        await self._reports.aclose()

    def about(self) -> AboutReply:
        """See `Reports.about`."""
        return self._reports.about(ProcessStatus(health="serving", in_flight=self.ring.running))

    def timelines(self, after: int, limit: int) -> TimelinesReply:
        """See `Reports.timelines`."""
        return self._reports.page(after, limit, None)


def _entry(edge: Edge, settings: Settings) -> AbstractContextManager[None]:
    """Return a block within which the views find this process."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(edge.address, edge.address)
    try:
        return published_entry(
            process_directory(),
            own_name("frontend"),
            _url(host, edge, settings),
            discovery=shared_directory(settings.runtime),
            is_frontend=True,
        )
    except ConfigError:  # no home directory
        return nullcontext()


def _url(host: str, edge: Edge, settings: Settings) -> str:
    return http_url(host, edge.port, "https" if settings.tls_certificate else "http")


def _published(edge: Edge, token: str) -> AbstractContextManager[None]:
    return published_token(control_directory(), edge.address, edge.port, token)


def _report(settings: Settings, port: int) -> None:
    scheme = "https" if settings.tls_certificate else "http"
    log.info("listening on %s://%s:%d", scheme, settings.host, port)
    if (warning := open_endpoint_warning(settings)) is not None:
        log.warning("%s", warning)
    notify("READY=1")
