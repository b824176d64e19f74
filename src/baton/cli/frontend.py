"""`baton frontend`: the OpenAI endpoint alone."""

import os

from baton.cli.settings_options import prepare_runtime, settings_command
from baton.config.settings import Settings
from baton.runtimes.dynamo.frontend_log import reason_filter


def _frontend(settings: Settings) -> int:
    settings = prepare_runtime(settings)
    os.environ["DYN_LOG"] = reason_filter(settings.runtime.log)  # read while the runtime is imported
    from baton.process.frontend import run_frontend
    from baton.process.title import set_process_title

    set_process_title("frontend", "frontend", settings.first_name, f"port {settings.port}")
    return run_frontend(settings)


frontend = settings_command(
    "frontend",
    "Start the OpenAI endpoint alone; it finds its workers by discovery.",
    _frontend,
    starts_engines=False,
    examples=(
        ("baton frontend --port 9000", "workers on this machine"),
        ("baton frontend --host 0.0.0.0 --api-key-file keys", "for clients on other machines"),
        ("baton frontend --runtime-discovery etcd", "workers on other machines"),
    ),
)
