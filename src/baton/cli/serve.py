"""`baton serve`: a frontend with its workers, as supervised processes on this machine."""

import sys

import click

from baton.cli.settings_options import settings_command
from baton.config.directories import log_directory
from baton.config.settings import Settings, open_endpoint_warning


def _serve(settings: Settings) -> int:
    from baton.topology.supervisor import run_supervisor

    return run_supervisor(settings, _print_ready)


def _print_ready(model: str, settings: Settings) -> None:
    from baton.engines.registry import embeds
    from baton.topology.process_specs import add_worker_command, describe_workers

    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{'https' if settings.tls_certificate else 'http'}://{host}:{settings.port}"
    key = " -H 'Authorization: Bearer KEY'" if settings.api_key or settings.api_key_file else ""
    if embeds(settings):
        path, body = "embeddings", f'{{"model": "{model}", "input": "Hello!"}}'
    else:
        path = "chat/completions"
        body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 32}}'
    logs = log_directory(settings) or "standard error"
    click.echo(f"Serving {model} on {address} with {describe_workers(settings)}  (logs: {logs})\n\nTry it:\n")
    click.echo(f"  curl {address}/v1/{path} -H 'Content-Type: application/json'{key} -d '{body}'\n")
    if (warning := open_endpoint_warning(settings)) is not None:
        click.echo(f"Warning: {warning}\n")
    if settings.prefill:
        click.echo(f"Add a worker while it serves:\n\n  {add_worker_command(settings)}\n")
    sys.stdout.flush()


serve = settings_command("serve", "Start an OpenAI endpoint with its workers, as processes on this machine.", _serve)
