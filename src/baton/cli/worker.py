"""`baton worker`: one worker process."""

from baton.cli.settings_options import prepare_runtime, settings_command
from baton.config.environment import short_process_name
from baton.config.settings import Settings


def _worker(settings: Settings) -> int:
    from baton.engines.registry import prepare_model, prepare_tokenizer
    from baton.process.title import set_process_title

    role = "worker" if settings.role == "auto" else settings.role
    set_process_title("worker", short_process_name(role), settings.first_name or settings.model)
    if settings.role == "process":
        settings = prepare_runtime(prepare_tokenizer(settings))
        from baton.process.text_processor import run_text_processor

        return run_text_processor(settings)
    # Before there is an event loop, and before the runtime's environment turns model hubs off.
    settings = prepare_model(settings)
    settings = prepare_runtime(settings)
    from baton.process.worker import run_worker

    return run_worker(settings)


worker = settings_command(
    "worker",
    "Start one worker.",
    _worker,
    examples=(
        ("baton worker ./model", "found by frontends on this machine"),
        ("baton worker ./model --role decode", "one more decode worker"),
        ("baton worker ./model --runtime-discovery etcd", "found by frontends on other machines"),
    ),
)
