"""Shell completion: the script of `baton completion`, and the values that depend on what runs."""

import click
from click.shell_completion import CompletionItem, get_completion_class

from baton.config.directories import process_directory
from baton.control.process_entries import read_entries
from baton.errors import ConfigError
from baton.topology.control_client import read_status
from baton.topology.control_messages import OperationError, Status
from baton.topology.instances import running_instances

VARIABLE = "_BATON_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a SHELL.

    \b
    bash:  echo 'eval "$(baton completion bash)"' >> ~/.bashrc
    zsh:   echo 'eval "$(baton completion zsh)"' >> ~/.zshrc
    fish:  baton completion fish > ~/.config/fish/completions/baton.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "baton", VARIABLE).source())


def complete_models(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of demo models, and directories."""
    from baton.models.demo import DEMOS

    names = [CompletionItem(name) for name in DEMOS if name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="dir")]


def complete_workers(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of the workers of a running `baton serve`."""
    names = [process.name for status in _running(ctx) for process in status.processes if process.group in status.counts]
    return _matching(names, incomplete)


def complete_logs(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names and roles of the processes of a running `baton serve`."""
    names = [name for status in _running(ctx) for each in status.processes for name in (each.group, each.name)]
    return _matching(names, incomplete)


def complete_groups(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete ROLE= with one worker more than there are."""
    names = [f"{role}={number + 1}" for status in _running(ctx) for role, number in status.counts.items()]
    return _matching(names, incomplete)


def complete_processes(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of all processes with a system server."""
    try:
        return _matching([entry.name for entry in read_entries(process_directory())], incomplete)
    except ConfigError:  # no home directory
        return []


def _running(ctx: click.Context) -> list[Status]:
    """Return the status of every `baton serve` that answers; of the one with `--port`, if it is given."""
    port = ctx.params.get("port")
    found = []
    for entry in running_instances():
        if port is None or entry.name.endswith(f":{port}"):
            try:
                found.append(read_status(entry.url))
            except OperationError:
                continue
    return found


def _matching(names: list[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in dict.fromkeys(names) if name.startswith(incomplete)]
