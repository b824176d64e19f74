"""`baton frontend`: the OpenAI endpoint alone."""

import os

from baton.cli.settings_options import prepare_runtime, settings_command
from baton.config.settings import Settings
from baton.runtimes.dynamo.frontend_log import reason_filter


def _frontend(settings: Settings) -> int:
    settings = prepare_runtime(settings)
    os.environ["DYN_LOG"] = reason_filter(settings.runtime.log)  # read while the runtime is imported
    from baton.process.frontend import run_frontend

    return run_frontend(settings)


frontend = settings_command(
    "frontend", "Start the OpenAI endpoint alone; it finds its workers by discovery.", _frontend, starts_engines=False
)
