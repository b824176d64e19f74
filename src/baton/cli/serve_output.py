"""What `baton serve` prints: what it starts, a line for each process that is ready, addresses, and the stop."""

import sys

import click

from baton.config.directories import log_directory
from baton.config.settings import Settings, endpoint_url, open_endpoint_warning


class ServeOutput:
    """Prints for `topology/terminal.py`: the start to standard output, the stop to standard error."""

    def starting(self, settings: Settings) -> None:
        """See `Terminal.starting`."""
        from baton.engines.registry import start_warning
        from baton.topology.process_specs import describe_workers

        _say(f"Starting {settings.first_name} with {describe_workers(settings)} (engine {settings.engine})")
        if (warning := start_warning(settings)) is not None:
            _say(f"Warning: {warning}")

    def ready(self, process: str, after_s: float, url: str) -> None:
        """See `Terminal.ready`."""
        _say(f"  {process:<12} ready after {after_s:5.1f} s   {url}".rstrip())

    def serving(self, settings: Settings, view_url: str | None) -> None:
        """See `Terminal.serving`."""
        from baton.topology.process_specs import add_worker_command, describe_workers

        model, *others = settings.served_names
        names = f"{model} (also as {', '.join(others)})" if others else model
        rows = "\n".join(f"  {title:<8} {text}" for title, text in addresses(settings, view_url))
        parts = [
            f"\nServing {names} on {endpoint_url(settings)} with {describe_workers(settings)}",
            rows,
            f"Try it:\n\n{_first_steps(settings)}",
        ]
        if settings.prefill:
            parts.append(f"Add a worker with other settings while it serves:\n\n  {add_worker_command(settings)}")
        if (warning := open_endpoint_warning(settings)) is not None:
            parts.append(f"Warning: {warning}")
        _say("\n\n".join(parts) + "\n")  # at once, so that a reader that finds the first line finds all

    def stopping(self, text: str) -> None:
        """See `Terminal.stopping`."""
        click.echo(text, err=True)


def addresses(settings: Settings, view_url: str | None) -> list[tuple[str, str]]:
    """Return the addresses of a deployment, each with its title."""
    url = endpoint_url(settings)
    port = "" if settings.port == Settings().port else f" --port {settings.port}"
    logs = log_directory(settings)
    return [
        ("API", f"{url}/v1"),
        *([("View", view_url)] if view_url is not None else []),
        ("Metrics", f"{url}/metrics, and /metrics of each address above"),
        ("Logs", f"{logs}   (baton logs -f{port})" if logs is not None else "standard error"),
        ("Control", f"baton top, baton scale, baton drain{'' if not port else f' with{port}'}"),
    ]


def _first_steps(settings: Settings) -> str:
    from baton.engines.registry import embeds

    model = settings.first_name
    key = " -H 'Authorization: Bearer KEY'" if settings.api_key or settings.api_key_file else ""
    if embeds(settings):
        path, body, chat = "embeddings", f'{{"model": "{model}", "input": "Hello!"}}', ""
    else:
        path = "chat/completions"
        body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 32}}'
        chat = f"  baton chat{'' if settings.port == Settings().port else f' --port {settings.port}'}\n"
    url = f"{endpoint_url(settings)}/v1/{path}"
    return f"{chat}  curl {url} -H 'Content-Type: application/json'{key} -d '{body}'"


def _say(text: str) -> None:
    click.echo(text)
    sys.stdout.flush()
