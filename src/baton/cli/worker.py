"""`baton worker`: one worker process."""

from baton.cli.settings_options import prepare_runtime, settings_command
from baton.config.settings import Settings


def _worker(settings: Settings) -> int:
    from baton.engines.registry import prepare_model

    # Before there is an event loop, and before the runtime's environment turns model hubs off.
    settings = prepare_model(settings)
    settings = prepare_runtime(settings)
    from baton.process.worker import run_worker

    return run_worker(settings)


worker = settings_command("worker", "Start one worker.", _worker)
