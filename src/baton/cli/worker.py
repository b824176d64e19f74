"""`baton worker`: one worker process."""

from baton.cli.settings_options import prepare_runtime, settings_command
from baton.config.settings import Settings


def _worker(settings: Settings) -> int:
    from baton.engines.registry import prepare_model, prepare_tokenizer

    if settings.role == "process":
        settings = prepare_runtime(prepare_tokenizer(settings))
        from baton.process.text_processor import run_text_processor

        return run_text_processor(settings)
    # Before there is an event loop, and before the runtime's environment turns model hubs off.
    settings = prepare_model(settings)
    settings = prepare_runtime(settings)
    from baton.process.worker import run_worker

    return run_worker(settings)


worker = settings_command("worker", "Start one worker.", _worker)
