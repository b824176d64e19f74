"""`baton router run`: one global router process."""

from baton.cli.router import router
from baton.cli.settings_options import prepare_runtime, settings_command
from baton.config.settings import Settings
from baton.errors import ConfigError


def _router(settings: Settings) -> int:
    from baton.engines.registry import prepare_tokenizer

    if not settings.topology:
        raise ConfigError("a router needs a file with its pools: give --topology FILE (see docs/router.md)")
    settings = prepare_tokenizer(settings)
    settings = prepare_runtime(settings)
    from baton.process.router import run_router
    from baton.process.title import set_process_title

    set_process_title("router", "router", settings.first_name)
    return run_router(settings)


router_run = settings_command(
    "run",
    "Start a global router; it finds its pools by discovery.",
    _router,
    process="router",
    starts_engines=False,
    examples=(("baton router run --topology pools.yaml", "the pools of a file; see `baton router check`"),),
)
router.add_command(router_run)
