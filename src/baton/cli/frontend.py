"""`baton frontend`: the OpenAI endpoint alone."""

from baton.cli.settings_options import prepare_runtime, settings_command
from baton.config.settings import Settings


def _frontend(settings: Settings) -> int:
    settings = prepare_runtime(settings)
    from baton.process.frontend import run_frontend

    return run_frontend(settings)


frontend = settings_command(
    "frontend", "Start the OpenAI endpoint alone; it finds its workers by discovery.", _frontend, starts_engines=False
)
