"""`baton serve`: a frontend with its workers, as supervised processes on this machine."""

from baton.cli.serve_output import ServeOutput
from baton.cli.settings_options import settings_command
from baton.config.settings import Settings


def _serve(settings: Settings) -> int:
    from baton.topology.supervisor import run_supervisor

    return run_supervisor(settings, ServeOutput())


serve = settings_command(
    "serve",
    "Start an OpenAI endpoint with its workers, as processes on this machine.",
    _serve,
    examples=(
        ("baton serve", "the demo model smollm2, on port 8000"),
        ("baton serve Qwen/Qwen3-0.6B --port 9000", "a model of the Hugging Face hub"),
        ("baton serve ./model --prefill 1 --decode 2", "disaggregated: prefill and decode apart"),
        ("baton serve ./model --workers 2 --router kv", "two workers, chosen by their prefix caches"),
        ("baton serve ./model --engine sglang -- --tp-size 2", "another engine, with arguments of its own"),
        ("baton serve --engine echo", "no model at all: repeats the prompt"),
    ),
)
