"""The web view of a `baton serve`, in the process of its supervisor: it stays when workers and frontends do not."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.config.directories import shared_directory
from baton.config.load import an_api_key, control_token
from baton.config.settings import Settings


@asynccontextmanager
async def running_view(settings: Settings) -> AsyncIterator[str | None]:
    """Serve the view within the block, and yield its URL; None if it is off. Raises ConfigError."""
    if not settings.view:
        yield None
        return
    from baton.views.deployment import LocalProcesses
    from baton.views.server import ViewServer

    view = ViewServer(
        LocalProcesses(str(settings.port), control_token(settings), shared_directory(settings.runtime)),
        host=settings.view_host,
        port=settings.view_port,
        token=settings.view_token,
        api_key=an_api_key(settings),
    )
    try:
        await view.start()
        yield view.url
    finally:
        await view.aclose()
